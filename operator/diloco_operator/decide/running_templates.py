"""
Running workloads keep the pod template that they were made with until the manifest changes it.

Pure. A new version of the operator may make other templates of the same manifest, and a new chart
has other default images. Neither restarts a pod: both reach a workload when the manifest changes
the template, or when none of its pods runs (docs/adr/0017-a-running-workload-keeps-its-template.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diloco.runtime import untrusted_json
from diloco_operator.decide.drift import covers
from diloco_operator.resources.inputs import stated_pod
from diloco_operator.resources.overlay import overlay
from diloco_operator.resources.pod_templates import MAIN, SPEC_FILE, SPEC_VOLUME
from diloco_operator.resources.queue_labels import LEARNER
from diloco_operator.resources.template_record import (
    inputs_of,
    template_of,
    template_text,
    with_template,
)
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, identity, labels
from diloco_operator.state.pods import has_run, lacks_image, waits_for_kubelet


def keep_templates(state: JobState, wants: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The wanted children, with the former template where a workload keeps it."""
    return (_kept(state, want) for want in wants)


def _kept(state: JobState, want: dict[str, Any]) -> dict[str, Any]:
    if want["kind"] not in ("StatefulSet", "Deployment"):
        return want
    live = state.child(*identity(want))
    if live is not None and _leaves_queue(live, want):
        running = template_of(live)
        return want if running is None else with_template(want, running)
    if live is None or (inputs_of(live) and template_text(live) == template_text(want)):
        return want
    template = _former_template(state, live, want)
    if template is None or not _runs(state, live, _image(template.get("spec"))):
        return want
    if _lacks_document(state, live, template, want):
        return want
    return with_template(want, template)


def _leaves_queue(live: Object, want: Object) -> bool:
    """
    Whether this ends the pods of a learner in a queue: its template changes only after that.

    Kueue refuses some changes of a template, and would refuse the end of the pods with them.
    """
    replicas = (live.get("spec") or {}).get("replicas")
    return LEARNER in labels(want) and bool(replicas) and not want["spec"]["replicas"]


def _former_template(state: JobState, live: Object, want: Object) -> Object | None:
    """The template that the workload was made with; None: the manifest has changed it since."""
    if inputs_of(live):
        template = template_of(live) if inputs_of(live) == inputs_of(want) else None
        return None if template and _counts_are_outdated(state, want, template) else template
    # Made by another version of the operator, whose record this one cannot compare. It had carried
    # out this manifest, unless the template lacks what the manifest states: then its rollout had
    # to wait. Another person's change since then is kept where there is no record at all.
    template = template_of(live) or (live.get("spec") or {}).get("template")
    if not template or state.previous.number("observedGeneration") != state.generation:
        return None
    role, region = labels(want)["diloco.dev/role"], labels(want)["diloco.dev/region"]
    former = template.get("spec") or {}
    stated = overlay(former, stated_pod(state.job, role, region))
    return template if covers(former, stated) else None


def _counts_are_outdated(state: JobState, want: Object, template: Object) -> bool:
    """
    Whether a syncer cannot learn how many learners the manifest has.

    The operator writes new numbers only into the document that this version mounts. A kept template
    may mount one of an earlier version, and those of format 1 never change.
    """
    if labels(want)["diloco.dev/role"] != "syncer":
        return False
    mounted = _spec_map(template)
    document = state.child("ConfigMap", mounted)
    if document is None or mounted == _spec_map(want["spec"]["template"]):
        return False
    try:
        text = (document.get("data") or {}).get(SPEC_FILE, "")
        stated = untrusted_json.parse(text, finite=False)["learners"]
    except (ValueError, TypeError, KeyError):
        return False
    return bool(stated != state.plan.spec.learners)


def _lacks_document(state: JobState, live: Object, template: Object, want: Object) -> bool:
    """
    Whether a pod cannot start because the document that the kept template mounts was deleted.

    This version may not be able to make it again: its name is a hash of what another version wrote.
    """
    mounted = _spec_map(template)
    if not mounted or mounted == _spec_map(want["spec"]["template"]):
        return False
    if state.child("ConfigMap", mounted):
        return False
    mine = (pod for pod in state.pods if _component(pod) == _component(live))
    return any(map(waits_for_kubelet, mine))


def _spec_map(template: Object) -> str:
    """The ConfigMap that the pods mount as their spec document; "": none."""
    volumes = (template.get("spec") or {}).get("volumes") or ()
    maps = [(v.get("configMap") or {}).get("name") for v in volumes if v.get("name") == SPEC_VOLUME]
    return str(maps[0]) if maps else ""


def _runs(state: JobState, live: Object, image: str) -> bool:
    """
    Whether pods of the workload have run.

    If there are pods with this image, one of them must have: an image that cannot be pulled is not
    kept. An admission webhook may have changed the image of all of them. In a job that has trained,
    pods that wait for something else count as well.
    """
    if not (live.get("spec") or {}).get("replicas"):
        return False
    pods = [pod for pod in state.pods if _component(pod) == _component(live)]
    with_image = [pod for pod in pods if _image(pod.get("spec")) == image]
    if any(map(has_run, with_image or pods)):
        return True
    # A drain evicts all pods of a workload at once: those that follow have not run yet.
    return bool(state.step) and not any(map(lacks_image, pods))


def _component(item: Object) -> tuple[str | None, str | None]:
    return labels(item).get("diloco.dev/role"), labels(item).get("diloco.dev/region")


def _image(pod: Any) -> str:
    """Image of the container `main`."""
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    found = containers if isinstance(containers, list) else ()
    mains = (each for each in found if isinstance(each, Mapping) and each.get("name") == MAIN)
    return next((str(main.get("image")) for main in mains), "")
