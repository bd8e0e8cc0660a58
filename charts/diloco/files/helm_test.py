"""
Run by `helm test`: checks that the operator is healthy, that the CRD is served, and that the API server
validates manifests against it. Standard library only; creates no object.
"""
# ruff: noqa: S105, S310, TID251  (a separate program in a pod of its own)

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
JOBS = "/apis/diloco.dev/v1alpha1"
VALID = {"learners": 2, "quorum": 2}
INVALID = {"learners": 2, "quorum": 3}


def healthy(url):
    """Whether the operator answers 200 within a minute."""
    for _ in range(30):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status == 200
        except OSError as error:
            print(f"{url}: {error}")
            time.sleep(2)
    return False


def ask(method, path, body=None):
    """Send a request to the API server; (status, response)."""
    with open(f"{TOKEN}/token") as file:
        token = file.read()
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}{path}",
        method=method,
        data=json.dumps(body).encode() if body else None,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=f"{TOKEN}/ca.crt")
    # Python 3.13 refuses CAs without a key usage extension, which many clusters have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def create(learners, quorum):
    """Create a job as a dry run; (status, the message of the server)."""
    job = {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "helm-test"},
        "spec": {
            "steps": 1,
            "sync": {"quorum": quorum},
            "learner": {"command": ["python", "train.py"]},
            "regions": [{"name": "eu", "learners": learners}],
        },
    }
    namespace = os.environ["NAMESPACE"]
    path = f"{JOBS}/namespaces/{namespace}/dilocojobs?dryRun=All&fieldValidation=Strict"
    status, answer = ask("POST", path, job)
    return status, answer.get("message", "")


def main():
    """Print one line per check; 1 if a check fails."""
    served = [resource["name"] for resource in ask("GET", JOBS)[1].get("resources", [])]
    valid, invalid = create(**VALID), create(**INVALID)
    checks = {
        "the operator is healthy": healthy(os.environ["HEALTH"]),
        f"the CRD is served with its status: {served}": {"dilocojobs", "dilocojobs/status"}
        <= set(served),
        f"a valid job is accepted: {valid}": valid[0] == 201,
        f"a job with a quorum of 3 out of 2 learners is rejected: {invalid}": invalid[0] == 422
        and "quorum" in invalid[1],
    }
    for check, passed in checks.items():
        print("ok    " if passed else "FAILED", check)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
