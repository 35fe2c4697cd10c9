{{/* Names, labels and images of all objects. */}}

{{- define "warmroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The number of routers. Ignored with an autoscaler. */}}
{{- define "warmroute.replicas" -}}
{{- $isShared := dig "index" "redis" "url" "" (fromYaml (include "warmroute.config" .)) -}}
{{- kindIs "invalid" .Values.replicaCount | ternary (ternary 2 1 (not (empty $isShared))) .Values.replicaCount -}}
{{- end -}}

{{/* The labels by which objects select pods: (list . COMPONENT). They never change. */}}
{{- define "warmroute.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object: (list . COMPONENT SUFFIX [ANNOTATIONS [LABELS]]). */}}
{{- define "warmroute.metadata" -}}
{{- $root := index . 0 -}}
{{- $annotations := dict -}}
{{- $labels := dict -}}
{{- if gt (len .) 3 }}{{ $annotations = index . 3 }}{{ end -}}
{{- if gt (len .) 4 }}{{ $labels = index . 4 }}{{ end -}}
name: {{ include "warmroute.fullname" $root }}{{ index . 2 }}
namespace: {{ $root.Release.Namespace }}
labels:
  helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  app.kubernetes.io/part-of: warmroute
  {{- include "warmroute.selector" . | nindent 2 }}
  {{- with merge (deepCopy $labels) $root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (deepCopy $annotations) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "warmroute.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "warmroute.serviceAccount" -}}
{{ default (ternary (include "warmroute.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end -}}

{{- define "warmroute.adminSecret" -}}
{{ default (printf "%s-admin" (include "warmroute.fullname" .)) .Values.admin.existingSecret }}
{{- end -}}

{{- define "warmroute.valkeySecret" -}}
{{ default (printf "%s-valkey" (include "warmroute.fullname" .)) .Values.valkey.existingSecret }}
{{- end -}}

{{/* The value that the cluster has for a random key of a Secret, or a new one: (list . SECRET KEY), in base64. */}}
{{- define "warmroute.keptSecret" -}}
{{- $root := index . 0 -}}
{{- $found := lookup "v1" "Secret" $root.Release.Namespace (index . 1) | default dict -}}
{{- get (get $found "data" | default dict) (index . 2) | default (randAlphaNum 40 | b64enc) -}}
{{- end -}}

{{/* What every pod of the chart has, engines excepted: (list . NODE-SELECTOR TOLERATIONS AFFINITY). */}}
{{- define "warmroute.podDefaults" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with index . 1 }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with index . 2 }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with index . 3 }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image and security of a container that runs warmroute, also in pods of engines with another security. */}}
{{- define "warmroute.container" -}}
image: {{ include "warmroute.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with merge (deepCopy .Values.securityContext) (pick .Values.podSecurityContext "runAsNonRoot" "runAsUser" "runAsGroup" "seccompProfile") }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Ports as a JSON list of {port, protocol} for a NetworkPolicy. */}}
{{- define "warmroute.tcp" -}}
{{- $ports := list -}}
{{- range . }}{{ $ports = append $ports (dict "protocol" "TCP" "port" (int .)) }}{{ end -}}
{{- toJson $ports -}}
{{- end -}}
