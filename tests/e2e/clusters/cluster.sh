#!/bin/bash
# Real Kubernetes clusters on one Linux machine without Docker: each cluster is one node in a network namespace of its
# own (so ports, packet filter and loopback are its own), and all nodes share a bridge, the "WAN".
#
#   cluster.sh check               exit 0 if this machine can run clusters; else print why not
#   cluster.sh packages            install Debian's packages
#   cluster.sh build               packages; build Kubernetes, kubectl, CoreDNS and helm with Go (minutes, once)
#   cluster.sh promtool            fetch promtool from Debian's package of Prometheus (seconds, once); print its path
#   cluster.sh kueue               build an image of Kueue's controller with Go (minutes, once); print its archive
#   cluster.sh up NAME-N           start a cluster; N (1 ... 40) gives it its addresses: the node is 10.91.0.(10+N)
#   cluster.sh up-ipv6 NAME-N      the same with IPv6 addresses only
#   cluster.sh up-dual NAME-N      the same with addresses of both families, IPv4 first
#   cluster.sh up-api NAME-N       etcd and API server alone: no pods, no controllers
#   cluster.sh up-groups NAME-N    etcd, and API server and scheduler of the version in pod-groups/go.mod, with PodGroups
#   cluster.sh unpack TAR...       import oci-archives once, for the nodes that start from now on
#   cluster.sh load NAME-N TAR     import an oci-archive into the node's containerd, unless it began with it
#   cluster.sh cut|heal NAME-N     take the node off the WAN / put it back (`exec` still reaches it)
#   cluster.sh shape NAME-N RATE   limit what the node receives from the WAN, such as 20mbit; none: no limit
#   cluster.sh api-stop|api-start NAME-N
#   cluster.sh exec NAME-N CMD...  run a command in the cluster's network namespace
#   cluster.sh down NAME-N         end everything that the cluster started, and remove its state
#
# Needs root, Debian's apt and Go, as `check` reports in detail. Programs and state: $DILOCO_E2E_CACHE (default ~/.cache/diloco-e2e): bin/, clusters/NAME-N/.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
CACHE=${DILOCO_E2E_CACHE:-$HOME/.cache/diloco-e2e}
BIN=$CACHE/bin
HYPERKUBE=$BIN/hyperkube
UNPACKED=$CACHE/unpacked
PACKAGES="containerd runc containernetworking-plugins etcd-server iptables nftables ethtool socat conntrack ipset buildah
  debootstrap openssl iproute2 gcc libc6-dev"

use() {   # the variables of one cluster
  NAME=$1 INDEX=${1##*-}
  [[ $INDEX =~ ^[0-9]+$ && $INDEX -ge 1 && $INDEX -le 40 ]] || { echo "$1: expected NAME-N with N from 1 to 40" >&2; exit 2; }
  D=$CACHE/clusters/$NAME WAN=dlc$INDEX NODE=10.91.0.$((10+INDEX)) WAN_NET=10.91.0.1/24 ANY=0.0.0.0 NODE_MASK=24
  PODS=10.$((100+INDEX)).0.0/16 POD_NET=10.$((100+INDEX)).0.0/24 SERVICES=10.$((150+INDEX)).0.0/16 KUBERNETES=10.$((150+INDEX)).0.1
  HOST=$NODE RANGES="[{\"subnet\": \"$POD_NET\"}]" ROUTES='{"dst": "0.0.0.0/0"}' NODE_6=
}

use_ipv6() {   # no address of the cluster is an IPv4 one but 127.0.0.1
  NODE=fd00:91::$((10+INDEX)) WAN_NET=fd00:91::1/64 ANY=:: NODE_MASK=64
  PODS=fd00:$((100+INDEX))::/56 POD_NET=fd00:$((100+INDEX))::/64 SERVICES=fd00:$((150+INDEX))::/112 KUBERNETES=fd00:$((150+INDEX))::1
  HOST=[$NODE] RANGES="[{\"subnet\": \"$POD_NET\"}]" ROUTES='{"dst": "::/0"}'
}

use_dual() {
  local ranges=$RANGES routes=$ROUTES pods=$PODS services=$SERVICES
  local node=$NODE wan_net=$WAN_NET any=$ANY mask=$NODE_MASK kubernetes=$KUBERNETES
  use_ipv6
  NODE_6=$NODE RANGES="$ranges, $RANGES" ROUTES="$routes, $ROUTES" PODS="$pods,$PODS" SERVICES="$services,$SERVICES"
  NODE=$node HOST=$node WAN_NET=$wan_net ANY=$any NODE_MASK=$mask KUBERNETES=$kubernetes
}

# --- programs --------------------------------------------------------------------------------------------------------

installed() { command -v containerd runc buildah etcd debootstrap nft >/dev/null && [ -x /usr/lib/cni/bridge ]; }
built() {
  local program
  for program in hyperkube kubectl coredns helm; do [ -x "$BIN/$program" ] || return; done
}

check() {   # one sentence for what is missing first
  [ "$(uname -s)" = Linux ] || { echo "they need Linux"; return 1; }
  [ "$(id -u)" = 0 ] || { echo "they need root"; return 1; }
  installed || command -v apt-get >/dev/null || { echo "they need Debian's apt"; return 1; }
  built || command -v go >/dev/null || { echo "they need Go"; return 1; }
  unshare --net --mount true 2>/dev/null || { echo "this container may not make network namespaces"; return 1; }
  local c
  for c in $(hierarchies); do
    { mkdir "$c/dl-check-$$" && rmdir "$c/dl-check-$$" && hand_down "$c"; } 2>/dev/null \
      || { echo "this container may not make cgroups in $c"; return 1; }
  done
}

packages() {
  mkdir -p "$BIN"
  exec 8>"$BIN/.packages.lock"; flock 8      # a second session waits, and finds everything there
  if ! installed; then
    # keep Debian from starting the daemons that it installs
    [ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; }
    apt-get update -qq
    # shellcheck disable=SC2086  # several arguments
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null
  fi
  exec 8>&-
}

build() {
  mkdir -p "$BIN"
  exec 9>"$BIN/.lock"; flock 9
  local downloads=
  # The network is busy with modules while apt unpacks.
  if ! built; then (cd "$HERE/programs" && go mod download) 9>&- & downloads=$!; fi
  packages
  [ -z "$downloads" ] || { wait "$downloads"; programs; }
  [ -f "$CACHE/pause.tar" ] || pause_image
  promtool >/dev/null || echo "no promtool: Debian's package of Prometheus cannot be fetched" >&2
}

promtool() {   # for the tests of the chart's alerts; the package would install a server as well
  local w
  if [ ! -x "$BIN/promtool" ]; then
    mkdir -p "$BIN"; w=$(mktemp -d); chmod 755 "$w"
    (cd "$w" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } >&2 \
      && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool && mv usr/bin/promtool "$BIN/") || { rm -r "$w"; return 1; }
    rm -r "$w"
  fi
  echo "$BIN/promtool"
}

programs() {   # one module for all: what they share is downloaded and compiled once
  local new=$BIN/.new version; cd "$HERE/programs"
  version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
  CGO_ENABLED=0 GOGC=400 go build -o "$new/" -gcflags=all=-dwarf=false -ldflags "-s -w \
    -X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1 \
    -X k8s.io/component-base/version.gitMinor=$(echo "$version" | cut -d. -f2)" ./hyperkube ./kubectl ./coredns helm.sh/helm/v3/cmd/helm
  mv "$new"/* "$BIN/"; rmdir "$new"
}

pause_image() {   # the first process of every pod: 20 lines of C, since none can be pulled
  local w; w=$(mktemp -d)
  cat > "$w/pause.c" <<'C'
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int s) { exit(0); }
static void reap(int s) { while (waitpid(-1, 0, WNOHANG) > 0); }
int main() { signal(SIGINT, end); signal(SIGTERM, end); signal(SIGCHLD, reap); for (;;) pause(); }
C
  gcc -static -Os -o "$w/pause" "$w/pause.c"
  image "$CACHE/pause.tar" localhost/pause:1 "$w/pause"; rm -r "$w"
}

image() {   # ARCHIVE NAME PROGRAM: an image of one static program
  local c; c=$(buildah from scratch)
  buildah copy -q "$c" "$3" "/${3##*/}" >/dev/null; buildah config --entrypoint "[\"/${3##*/}\"]" "$c"
  buildah commit -q "$c" "oci-archive:$1.new:$2" >/dev/null; buildah rm "$c" >/dev/null
  mv "$1.new" "$1"
}

kueue() {   # of the version in kueue/go.mod
  mkdir -p "$BIN"
  packages
  exec 9>"$BIN/.kueue.lock"; flock 9
  local version archive w; cd "$HERE/kueue"
  version=$(go list -m -f '{{.Version}}' sigs.k8s.io/kueue) archive=$CACHE/kueue-$version.tar
  if [ ! -f "$archive" ]; then
    w=$(mktemp -d)
    CGO_ENABLED=0 go build -o "$w/manager" -gcflags=all=-dwarf=false \
      -ldflags "-s -w -X sigs.k8s.io/kueue/pkg/version.GitVersion=$version" sigs.k8s.io/kueue/cmd/kueue
    image "$archive" "localhost/kueue:$version" "$w/manager"; rm -r "$w"
  fi
  echo "$archive"
}

pod_groups() {   # API server and scheduler of the version in pod-groups/go.mod
  exec 9>"$BIN/.pod-groups.lock"; flock 9
  local version; cd "$HERE/pod-groups"
  version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes) HYPERKUBE=$BIN/kubernetes-$version
  [ -x "$HYPERKUBE" ] || {
    CGO_ENABLED=0 GOGC=400 go build -o "$HYPERKUBE.new" -gcflags=all=-dwarf=false -ldflags "-s -w \
      -X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1 \
      -X k8s.io/component-base/version.gitMinor=$(echo "$version" | cut -d. -f2)" .
    mv "$HYPERKUBE.new" "$HYPERKUBE"
  }
  exec 9>&-
}

# --- small tools -----------------------------------------------------------------------------------------------------

in_ns() { nsenter --net="/run/netns/dl-$NAME" -- "$@"; }   # the network only: kubelet and containerd must share mounts
start() {   # GOMAXPROCS: Go's scheduler takes a sixth of what an idle cluster costs to look for work on a second core
  local name=$1; shift
  GOMAXPROCS=1 setsid nsenter --net="/run/netns/dl-$NAME" -- "$@" >>"$D/log/$name.log" 2>&1 </dev/null 9>&- & echo $! > "$D/run/$name.pid"
}
wait_for() {
  for _ in $(seq 300); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
  echo "$NAME: not within the time: $*; see $D/log" >&2; return 1
}
kubectl() { in_ns "$BIN/kubectl" --kubeconfig "$D/admin.conf" "$@"; }
ctrd() { ctr -a "$D/run/containerd.sock" -n k8s.io "$@"; }
stop() {   # SIGNAL PART: by the pid that `start` wrote
  local file=$D/run/$2.pid pid
  [ -f "$file" ] || return 0
  pid=$(cat "$file"); kill "-$1" "$pid" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  rm -f "$file"
}

# --- a cluster -------------------------------------------------------------------------------------------------------

network() {
  # Another session may do the same at this moment.
  ip link add dlcwan type bridge 2>/dev/null || ip link show dlcwan >/dev/null
  ip addr replace "$WAN_NET" dev dlcwan
  ip link set dlcwan up
  ip link del "$WAN" 2>/dev/null || true   # of a session that was killed
  ip netns add "dl-$NAME"
  ip link add "$WAN" type veth peer name wan0 netns "dl-$NAME"
  ip link set "$WAN" master dlcwan up
  in_ns ip link set lo up
  # Without it, an IPv6 address cannot be used before it is known that no other node has it.
  in_ns sysctl -qw net.ipv6.conf.wan0.accept_dad=0
  in_ns ip addr add "$NODE/$NODE_MASK" dev wan0
  [ -z "$NODE_6" ] || in_ns ip addr add "$NODE_6/64" dev wan0
  in_ns ip link set wan0 up
  in_ns ip route add default via "${WAN_NET%/*}"
  in_ns sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1 net.ipv6.conf.all.forwarding=1
}

pki() {
  openssl req -x509 -newkey rsa:2048 -nodes -keyout pki/ca.key -out pki/ca.crt -days 365 -subj /CN=kube-ca 2>/dev/null
  sign() {
    openssl req -newkey rsa:2048 -nodes -keyout "pki/$1.key" -out "pki/$1.csr" -subj "$2" 2>/dev/null
    openssl x509 -req -in "pki/$1.csr" -CA pki/ca.crt -CAkey pki/ca.key -CAcreateserial -days 365 -out "pki/$1.crt" \
      -extfile <(printf '%s' "${3:-basicConstraints=CA:FALSE}") 2>/dev/null
  }
  sign apiserver /CN=kube-apiserver "subjectAltName=IP:127.0.0.1,IP:$NODE,IP:$KUBERNETES,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost"
  sign admin /O=system:masters/CN=admin
  sign controllers /CN=system:kube-controller-manager
  sign scheduler /CN=system:kube-scheduler
  sign kubelet "/O=system:nodes/CN=system:node:$NAME" "subjectAltName=IP:$NODE,DNS:$NAME"
  sign kubelet-client /O=system:masters/CN=apiserver-kubelet
  openssl genrsa -out pki/sa.key 2048 2>/dev/null; openssl rsa -in pki/sa.key -pubout -out pki/sa.pub 2>/dev/null
  local b64="base64 -w0" user
  for user in admin controllers scheduler kubelet; do
    cat > $user.conf <<Y
apiVersion: v1
kind: Config
clusters: [{name: $NAME, cluster: {server: "https://$HOST:6443", certificate-authority-data: $($b64 pki/ca.crt)}}]
users: [{name: $NAME-$user, user: {client-certificate-data: $($b64 pki/$user.crt), client-key-data: $($b64 pki/$user.key)}}]
contexts: [{name: $NAME, context: {cluster: $NAME, user: $NAME-$user}}]
current-context: $NAME
Y
  done
}

api_server() {
  cd "$D"
  start apiserver "$HYPERKUBE" kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=$ANY --secure-port=6443 \
    --advertise-address="$NODE" --tls-cert-file=pki/apiserver.crt --tls-private-key-file=pki/apiserver.key --client-ca-file=pki/ca.crt \
    --service-account-key-file=pki/sa.pub --service-account-signing-key-file=pki/sa.key --service-account-issuer=https://kubernetes.default.svc \
    --authorization-mode=Node,RBAC --service-cluster-ip-range="$SERVICES" --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate=pki/kubelet-client.crt --kubelet-client-key=pki/kubelet-client.key --allow-privileged=true \
    --shutdown-delay-duration=0s --audit-policy-file="$HERE/audit.yaml" --audit-log-path="$D/log/audit.log" "$@"
  wait_for kubectl get --raw /readyz
}

controllers() {
  start controllers "$HYPERKUBE" kube-controller-manager --kubeconfig=controllers.conf --root-ca-file=pki/ca.crt \
    --service-account-private-key-file=pki/sa.key --use-service-account-credentials --allocate-node-cidrs \
    --cluster-cidr="$PODS" --service-cluster-ip-range="$SERVICES" \
    --cluster-signing-cert-file=pki/ca.crt --cluster-signing-key-file=pki/ca.key --leader-elect=false
  start scheduler "$HYPERKUBE" kube-scheduler --kubeconfig=scheduler.conf --leader-elect=false
}

hierarchies() {   # of cgroups: the one of v2, or v1's
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; return; fi
  local c
  for c in /sys/fs/cgroup/*/; do [ ! -e "$c/cgroup.procs" ] || echo "${c%/}"; done
}

hand_down() {   # v2: a group has the controllers that its parent enables
  local f
  # shellcheck disable=SC2013  # one line of words
  [ ! -e "$1/cgroup.controllers" ] || for f in $(cat "$1/cgroup.controllers"); do echo "+$f" > "$1/cgroup.subtree_control" || return; done
}

cgroups() {   # a root of its own: a kubelet ends every pod below its cgroup root that it does not know
  local c f
  for c in $(hierarchies); do
    hand_down "$c"
    mkdir -p "$c/dl-$NAME"
    [ -e "$c/cgroup.controllers" ] || [ ! -e "$c/cpuset.cpus" ] || \
      for f in cpuset.cpus cpuset.mems; do cat "$c/$f" > "$c/dl-$NAME/$f"; done
  done
}

container_runtime() {
  cat > cni/10-bridge.conflist <<Y
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$D/ipam", "ranges": [$RANGES], "routes": [$ROUTES]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
Y
  # restrict_oom_score_adj: root without CAP_SYS_RESOURCE may not lower it, and runc would fail with "can't get final child's PID"
  cat > containerd.toml <<Y
version = 2
root = "$D/containerd"
state = "$D/run/containerd"
[grpc]
  address = "$D/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "localhost/pause:1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$D/cni"
Y
  unpacked
  start containerd containerd -c containerd.toml
  wait_for ctr -a run/containerd.sock version
  load "$CACHE/pause.tar"
}

node() {   # podLogsDir: a kubelet deletes the logs of pods that it does not know, such as those of another cluster
  cat > kubelet.yaml <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $D/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $D/pki/kubelet.crt
tlsPrivateKeyFile: $D/pki/kubelet.key
cgroupDriver: cgroupfs
cgroupRoot: /dl-$NAME
podLogsDir: $D/log/pods
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://$D/run/containerd.sock
clusterDNS: [$NODE]
clusterDomain: cluster.local
resolvConf: /etc/resolv.conf
evictionHard: {memory.available: "0%", nodefs.available: "0%", imagefs.available: "0%"}
localStorageCapacityIsolation: false
enforceNodeAllocatable: []
imageGCHighThresholdPercent: 100
Y
  start kubelet "$HYPERKUBE" kubelet --config=kubelet.yaml --kubeconfig=kubelet.conf --root-dir="$D/kubelet" --hostname-override="$NAME" --node-ip="$NODE${NODE_6:+,$NODE_6}"
  cat > proxy.yaml <<Y
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: $PODS
clientConnection: {kubeconfig: $D/admin.conf}
hostnameOverride: $NAME
conntrack: {maxPerCore: 0}
Y
  start proxy "$HYPERKUBE" kube-proxy --config=proxy.yaml
  printf '.:53 {\n  bind %s\n  errors\n  kubernetes cluster.local in-addr.arpa ip6.arpa {\n    kubeconfig %s/admin.conf\n    ttl 5\n  }\n  cache 5\n}\n' "$NODE" "$D" > Corefile
  start coredns "$BIN/coredns" -conf Corefile
  wait_for sh -c "nsenter --net=/run/netns/dl-$NAME '$BIN/kubectl' --kubeconfig '$D/admin.conf' get node '$NAME' | grep -q ' Ready'"
  wait_for kubectl get serviceaccount default
}

load() {
  [ -e "$D/containerd/archives/${1##*/}" ] || ctrd images import "$1" >/dev/null
}

unpack() {   # the root of a containerd that has these images; importing them takes 15 to 30 s of CPU
  mkdir -p "$CACHE"
  exec 9>"$CACHE/.unpacked.lock"; flock 9
  local archive missing=
  for archive in "$@"; do [ -e "$UNPACKED/archives/${archive##*/}" ] || missing=yes; done
  [ -n "$missing" ] || return 0
  D=$CACHE/unpacking; rm -rf "$D" "$UNPACKED"; mkdir -p "$D/run" "$D/containerd/archives"; cd "$D"
  printf 'version = 2\nroot = "%s"\nstate = "%s"\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\n  address = "%s"\n' \
    "$D/containerd" "$D/run/containerd" "$D/run/containerd.sock" > containerd.toml
  containerd -c containerd.toml > containerd.log 2>&1 </dev/null 9>&- & pid=$!
  trap 'kill $pid 2>/dev/null' EXIT
  NAME=unpack wait_for ctr -a run/containerd.sock version
  for archive in "$@"; do load "$archive"; touch "$D/containerd/archives/${archive##*/}"; done
  kill $pid; wait $pid || true   # its databases are closed when it has ended
  trap - EXIT
  mv containerd "$UNPACKED"; cd /; rm -rf "$D"
}

unpacked() {   # a copy whose image files are links: containerd and the kernel only read them; the databases are its own
  exec 9>"$CACHE/.unpacked.lock"; flock -s 9
  [ ! -d "$UNPACKED" ] || cp -al "$UNPACKED" containerd
  exec 9>&-
  [ ! -d containerd ] || find containerd -name '*.db' -exec sh -c 'cp "$0" "$0.own" && mv "$0.own" "$0"' {} \;
}

up() {   # yes: with a node; no: API server alone; groups: with PodGroups and a scheduler
  local gate=
  if [ "$1" = groups ]; then pod_groups; gate=--feature-gates=GenericWorkload=true; fi
  [ ! -d "$D" ] || down
  mkdir -p "$D"/{pki,log,run,cni}; chmod 700 "$D"; cd "$D"
  network; pki
  start etcd etcd --data-dir "$D/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
  api_server ${gate:+"$gate" --runtime-config=scheduling.k8s.io/v1beta1=true}
  [ -z "$gate" ] || start scheduler "$HYPERKUBE" kube-scheduler --kubeconfig=scheduler.conf --leader-elect=false "$gate"
  if [ "$1" = yes ]; then controllers; cgroups; container_runtime; node; fi
  echo "$D/admin.conf"
}

pod_pids() { hierarchies | while read -r c; do find "$c/dl-$NAME" -name cgroup.procs -exec cat {} + 2>/dev/null; done | sort -un; }
pod_namespaces() {   # names in /run/netns of our pods' networks
  local ours name
  ours=" $(for pid in $(pod_pids); do stat -L -c %i "/proc/$pid/ns/net" 2>/dev/null || true; done | sort -u | tr '\n' ' ')"
  for name in /run/netns/cni-*; do
    [[ "$ours" != *" $(stat -L -c %i "$name" 2>/dev/null || echo none) "* ]] || echo "${name##*/}"
  done
}
shims() {   # containerd's helpers of this cluster alone: they carry the path of its socket
  local p
  for p in /proc/[0-9]*; do
    { tr '\0' ' ' < "$p/cmdline"; } 2>/dev/null | grep -q "containerd-shim.* -address $D/run/containerd.sock" && echo "${p#/proc/}"
  done
  return 0
}

down() {
  cd /
  local part pid c name names
  for part in kubelet proxy coredns scheduler controllers apiserver etcd; do stop KILL $part; done
  names=$(pod_namespaces)
  for pid in $(shims) $(pod_pids); do kill -KILL "$pid" 2>/dev/null || true; done
  stop KILL containerd
  (grep -o " $D/[^ ]*" /proc/mounts || true) | sort -r | while read -r c; do umount -l "$c" 2>/dev/null || true; done
  for name in $names; do ip netns del "$name" 2>/dev/null || true; done
  ip netns del "dl-$NAME" 2>/dev/null || true
  ip link del "$WAN" 2>/dev/null || true
  for c in $(hierarchies); do
    for _ in $(seq 50); do
      [ -d "$c/dl-$NAME" ] || break
      find "$c/dl-$NAME" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    done
  done
  rm -rf "$D"
}

case ${1:-} in check|packages|build|promtool|kueue|unpack|up|up-ipv6|up-dual|up-api|up-groups|load|cut|heal|shape|api-stop|api-start|exec|down) ;; *) sed -n '2,26s/^# \?//p' "$0"; exit 2 ;; esac
[[ $1 =~ ^(check|packages|build|promtool|kueue|unpack)$ ]] || use "${2:?NAME-N}"
case $1 in
  check) check ;;
  packages) packages ;;
  build) build ;;
  promtool) promtool ;;
  kueue) kueue ;;
  unpack) unpack "${@:2}" ;;
  up) up yes ;;
  up-ipv6) use_ipv6; up yes ;;
  up-dual) use_dual; up yes ;;
  up-api) up no ;;
  up-groups) up groups ;;
  load) load "$3" ;;
  cut) ip link set "$WAN" down ;;
  heal) ip link set "$WAN" up ;;
  shape) tc qdisc del dev "$WAN" root 2>/dev/null || true
         [ "$3" = none ] || tc qdisc add dev "$WAN" root tbf rate "$3" burst 256kb latency 200ms ;;
  api-stop) stop TERM apiserver ;;
  api-start) api_server ;;
  exec) in_ns "${@:3}" ;;
  down) down ;;
esac
