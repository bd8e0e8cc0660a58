{{- define "diloco.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* Name of the release's objects. */}}
{{- define "diloco.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- $name := include "diloco.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Name of cluster-scoped objects: releases in two namespaces may have the same name. */}}
{{- define "diloco.clusterName" -}}
{{- printf "%s:%s" (include "diloco.fullname" .) .Release.Namespace }}
{{- end }}

{{/* Identifies the release among all operators of the cluster: the mark on its jobs, and its Lease. */}}
{{- define "diloco.installation" -}}
{{- printf "%s/%s" .Release.Namespace (include "diloco.fullname" .) }}
{{- end }}

{{- define "diloco.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "diloco.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Selector of the operator's pod; immutable. */}}
{{- define "diloco.selectorLabels" -}}
app.kubernetes.io/name: {{ include "diloco.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "diloco.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "diloco.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: diloco
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Reference of an image; argument: list of the root context and operator, syncer or worker. */}}
{{- define "diloco.image" -}}
{{- $root := index . 0 }}
{{- $image := index $root.Values.images (index . 1) }}
{{- $name := $image.repository }}
{{- with $root.Values.images.registry }}
{{- $name = printf "%s/%s" (trimSuffix "/" .) $name }}
{{- end }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) }}
{{- end }}
{{- end }}

{{- define "diloco.pullSecrets" -}}
{{- with .Values.images.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Rule for the Secrets of jobs; patch: those that cert-manager makes are owned by their job. Who sets an owner
needs delete, where OwnerReferencesPermissionEnforcement is enabled. */}}
{{- define "diloco.secretRule" -}}
apiGroups: [""]
resources: [secrets]
verbs: [get{{ if .Values.rbac.certManager }}, patch, delete{{ end }}]
{{- end }}

{{/* Rules of the operator for the objects of a namespace: exactly those that it uses. */}}
{{- define "diloco.rules" -}}
- apiGroups: [diloco.dev]
  resources: [dilocojobs]
  verbs: [get, list, watch, delete]
- apiGroups: [diloco.dev]
  resources: [dilocojobs/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion, where OwnerReferencesPermissionEnforcement is enabled.
- apiGroups: [diloco.dev]
  resources: [dilocojobs/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, persistentvolumeclaims, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  # delete: outdated pods of learners of several pods, ended pods of suspended jobs, and by force learners on lost nodes.
  # patch: the failed pods of a failed job stay without their StatefulSet.
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
# The conditions of a Workload: why the learners of a job in a queue wait.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
{{- if .Values.rbac.tlsSecrets }}
- {{- include "diloco.secretRule" . | nindent 2 }}
{{- end }}
{{- if .Values.jobs.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- if .Values.rbac.podGroups }}
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- if .Values.rbac.certManager }}
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, list, create, patch, delete]
{{- end }}
{{- end }}
