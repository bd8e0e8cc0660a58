/*
 * A long, thin link between two network namespaces, in userspace: no netem, no kernel module.
 *
 *   wan NAMESPACE_A NAMESPACE_B ONE_WAY_MS RATE_MBIT QUEUE_MB MTU
 *
 * Makes tun0 in each (10.9.0.1/24 in A, 10.9.0.2/24 in B) and carries packets both ways at the same
 * time: a queue of QUEUE_MB that drops what does not fit, the rate, then the delay. The kernel's own
 * TCP runs on both sides. Prints "ready"; on SIGTERM, what it carried and dropped.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_BYTES 70000
#define MAX_PACKETS (1u << 19)
#define MAX_SLEEP_NS 1000000
#define MIN_SLEEP_NS 100000 /* three packets at 1 Gbit/s; less would burn a core */

struct packet {
  int64_t due_ns;
  int bytes;
  char *data;
};

struct direction {
  int in, out;
  struct packet *queue; /* ring; head and tail only grow */
  unsigned head, tail;
  int64_t free_at_ns; /* when the last byte queued so far has left */
  long packets, bytes, dropped;
};

static volatile sig_atomic_t stopped;
static int64_t delay_ns, queue_ns;
static double ns_per_byte;

static void on_signal(int number) {
  (void)number;
  stopped = 1;
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
  perror(what);
  exit(1);
}

static int open_tun(const char *namespace, const char *address, int mtu) {
  char text[512];
  snprintf(text, sizeof text, "/run/netns/%s", namespace);
  int ns = open(text, O_RDONLY);
  if (ns < 0 || setns(ns, CLONE_NEWNET)) die(text);
  close(ns);
  int fd = open("/dev/net/tun", O_RDWR);
  struct ifreq request;
  memset(&request, 0, sizeof request);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  strcpy(request.ifr_name, "tun0");
  if (fd < 0 || ioctl(fd, TUNSETIFF, &request)) die("/dev/net/tun");
  snprintf(text, sizeof text,
           "ip link set lo up; ip addr add %s dev tun0; ip link set tun0 mtu %d txqueuelen 20000 up",
           address, mtu);
  if (system(text)) exit(1);
  fcntl(fd, F_SETFL, O_NONBLOCK);
  return fd;
}

/* Packets that arrived: into the queue, or dropped. True if there were any. */
static int take_in(struct direction *d) {
  static __thread char buffer[MAX_BYTES];
  int any = 0;
  for (int i = 0; i < 64; i++) {
    int bytes = read(d->in, buffer, sizeof buffer);
    if (bytes <= 0) break;
    any = 1;
    int64_t now = now_ns(), start = d->free_at_ns > now ? d->free_at_ns : now;
    if (start - now > queue_ns || d->tail - d->head >= MAX_PACKETS) {
      d->dropped++;
      continue;
    }
    d->free_at_ns = start + (int64_t)(bytes * ns_per_byte);
    struct packet *p = &d->queue[d->tail++ % MAX_PACKETS];
    p->due_ns = d->free_at_ns + delay_ns;
    p->bytes = bytes;
    p->data = malloc(bytes);
    memcpy(p->data, buffer, bytes);
  }
  return any;
}

/* Packets that have been under way long enough. True if there were any. */
static int let_out(struct direction *d) {
  int any = 0;
  while (d->head != d->tail) {
    struct packet *p = &d->queue[d->head % MAX_PACKETS];
    if (p->due_ns > now_ns()) break;
    if (write(d->out, p->data, p->bytes) < 0 && errno == EAGAIN) break;
    d->packets++;
    d->bytes += p->bytes;
    free(p->data);
    d->head++;
    any = 1;
  }
  return any;
}

static void *carry(void *argument) {
  struct direction *d = argument;
  while (!stopped) {
    if (take_in(d) | let_out(d)) continue;
    int64_t wait = MAX_SLEEP_NS;
    if (d->head != d->tail) {
      int64_t left = d->queue[d->head % MAX_PACKETS].due_ns - now_ns();
      if (left < wait) wait = left;
    }
    if (wait < MIN_SLEEP_NS) wait = MIN_SLEEP_NS;
    struct pollfd poll_in = {.fd = d->in, .events = POLLIN};
    struct timespec timeout = {.tv_nsec = wait};
    ppoll(&poll_in, 1, &timeout, NULL);
  }
  return NULL;
}

int main(int count, char **arguments) {
  if (count != 7) {
    fprintf(stderr, "wan: 6 arguments expected, see wan.c\n");
    return 2;
  }
  delay_ns = atof(arguments[3]) * 1e6;
  ns_per_byte = 8e3 / atof(arguments[4]);
  queue_ns = atof(arguments[5]) * 1e6 * ns_per_byte;
  int mtu = atoi(arguments[6]);
  signal(SIGTERM, on_signal);
  signal(SIGINT, on_signal);
  int a = open_tun(arguments[1], "10.9.0.1/24", mtu);
  int b = open_tun(arguments[2], "10.9.0.2/24", mtu);
  struct direction directions[2] = {{.in = a, .out = b}, {.in = b, .out = a}};
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    directions[i].queue = calloc(MAX_PACKETS, sizeof(struct packet));
    if (!directions[i].queue) die("memory");
    pthread_create(&threads[i], NULL, carry, &directions[i]);
  }
  printf("ready\n");
  fflush(stdout);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < 2; i++)
    printf("%s: %ld packets, %.1f MB, %ld dropped\n", i ? "B to A" : "A to B",
           directions[i].packets, directions[i].bytes / 1e6, directions[i].dropped);
  return 0;
}
