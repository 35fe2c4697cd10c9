{{/* The router's configuration, and what follows from it. */}}

{{/* router.yaml: `config` with the credentials of Redis, and a source for the engines of this chart. */}}
{{- define "warmroute.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $redis := dict -}}
{{- if .Values.valkey.enabled -}}
{{- $_ := set $redis "url" (printf "redis://%s-valkey:6379/0" (include "warmroute.fullname" .)) -}}
{{- $_ := set $redis "password_file" "/run/secrets/warmroute/valkey/password" -}}
{{- end -}}
{{- with .Values.redis -}}
{{- if .existingSecret -}}
{{- if .usernameKey }}{{ $_ := set $redis "username_file" "/run/secrets/warmroute/redis/username" }}{{ end -}}
{{- if .passwordKey }}{{ $_ := set $redis "password_file" "/run/secrets/warmroute/redis/password" }}{{ end -}}
{{- end -}}
{{- if .tls.existingSecret -}}
{{- $tls := dict -}}
{{- range $key, $file := dict "caKey" "ca_file" "certKey" "cert_file" "keyKey" "key_file" -}}
{{- if index $.Values.redis.tls $key }}{{ $_ := set $tls $file (printf "/run/secrets/warmroute/redis-tls/%s" (trimSuffix "_file" $file)) }}{{ end -}}
{{- end -}}
{{- $_ := set $redis "tls" $tls -}}
{{- end -}}
{{- end -}}
{{- with .Values.tenants -}}
{{- if .existingSecret }}{{ $config = mergeOverwrite (dict "tenants" (printf "/run/secrets/warmroute/tenants/%s" .existingSecretKey)) $config }}{{ end -}}
{{- end -}}
{{- if .Values.names }}{{ $config = mergeOverwrite (dict "names" "/etc/warmroute/names/names.yaml") $config }}{{ end -}}
{{- if $redis }}{{ $config = mergeOverwrite (dict "index" (dict "redis" $redis)) $config }}{{ end -}}
{{- if .Values.picker.enabled }}{{ $config = mergeOverwrite (dict "picker" (dict "host" "0.0.0.0" "port" .Values.picker.port)) $config }}{{ end -}}
{{- with fromYamlArray (include "warmroute.sources" .) -}}
{{- $_ := set $config "discovery" (merge (dict "kubernetes" .) (get $config "discovery" | default dict)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The sources of pods in this cluster's API server, as a list: those of `config`, which may be one without a list, and
the chart's own engines. */}}
{{- define "warmroute.sources" -}}
{{- $sources := get (get .Values.config "discovery" | default dict) "kubernetes" | default list -}}
{{- if kindIs "map" $sources }}{{ $sources = list $sources }}{{ end -}}
{{- if .Values.picker.enabled -}}
{{- $sources = append $sources (dict "inference_pool" (include "warmroute.inferencePool" .)) -}}
{{- else if .Values.engines.pools -}}
{{- $own := printf "app.kubernetes.io/instance=%s,app.kubernetes.io/component=engine" .Release.Name -}}
{{- $sources = append $sources (dict "selector" $own) -}}
{{- end -}}
{{- toYaml $sources -}}
{{- end -}}

{{/* The name of the InferencePool that the picker follows. */}}
{{- define "warmroute.inferencePool" -}}
{{- default (include "warmroute.fullname" .) .Values.picker.inferencePool.name -}}
{{- end -}}

{{/* Resources of a router, with a memory limit that follows from its configuration, in MiB: the program, a tokenizer and
two prompt caches a model, bodies, and the replica of the index. */}}
{{- define "warmroute.routerResources" -}}
{{- $config := fromYaml (include "warmroute.config" .) -}}
{{- $mib := 1048576 -}}
{{- $caches := div (dig "index" "tokens_cache_bytes" 67108864 $config | int64) $mib | mul 2 | add 100 | mul (max 1 (len (get $config "models" | default list))) -}}
{{- $bodies := div (dig "limits" "max_held_bytes" 1073741824 $config | int64) $mib -}}
{{- $replica := 0 -}}
{{- if dig "index" "redis" "url" "" $config -}}
{{- $replica = div (dig "index" "redis" "max_replica_bytes" 2147483648 $config | int64) $mib -}}
{{- end -}}
{{- $limit := printf "%dMi" (max 2048 (add 512 $caches $bodies $replica)) -}}
{{- toYaml (merge (deepCopy .Values.resources) (dict "limits" (dict "memory" $limit))) -}}
{{- end -}}

{{/* Mounts of the configuration and of the credentials that it names. */}}
{{- define "warmroute.mounts" -}}
- {name: config, mountPath: /etc/warmroute/router.yaml, subPath: router.yaml, readOnly: true}
{{- if .Values.valkey.enabled }}
- {name: valkey, mountPath: /run/secrets/warmroute/valkey, readOnly: true}
{{- end }}
{{- if .Values.redis.existingSecret }}
- {name: redis, mountPath: /run/secrets/warmroute/redis, readOnly: true}
{{- end }}
{{- if .Values.redis.tls.existingSecret }}
- {name: redis-tls, mountPath: /run/secrets/warmroute/redis-tls, readOnly: true}
{{- end }}
{{- range .Values.tokenizers }}
- name: tokenizer-{{ .name }}
  mountPath: /tokenizers/{{ .name }}
  readOnly: true
  {{- with .persistentVolumeClaim }}
  {{- with .subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* The volumes of these mounts in pods of publishers, whose user of Redis may be another one. */}}
{{- define "warmroute.publisherVolumes" -}}
{{- $values := deepCopy .Values -}}
{{- with .Values.redis.publisherSecret }}{{ $_ := set $values.redis "existingSecret" . }}{{ end -}}
{{- include "warmroute.volumes" (set (omit . "Values") "Values" $values) -}}
{{- end -}}

{{/* The volumes of these mounts. */}}
{{- define "warmroute.volumes" -}}
- name: config
  configMap: {name: {{ include "warmroute.fullname" . }}}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- if .Values.valkey.enabled }}
- name: valkey
  secret:
    secretName: {{ include "warmroute.valkeySecret" . }}
    items: [{key: {{ .Values.valkey.existingSecretKey | quote }}, path: password}]
{{- end }}
{{- with .Values.redis }}
{{- if .existingSecret }}
- name: redis
  secret:
    secretName: {{ .existingSecret }}
    items:
      {{- if .usernameKey }}
      - {key: {{ .usernameKey | quote }}, path: username}
      {{- end }}
      {{- if .passwordKey }}
      - {key: {{ .passwordKey | quote }}, path: password}
      {{- end }}
{{- end }}
{{- with .tls }}
{{- if .existingSecret }}
- name: redis-tls
  secret:
    secretName: {{ .existingSecret }}
    items:
      {{- if .caKey }}
      - {key: {{ .caKey | quote }}, path: ca}
      {{- end }}
      {{- if .certKey }}
      - {key: {{ .certKey | quote }}, path: cert}
      {{- end }}
      {{- if .keyKey }}
      - {key: {{ .keyKey | quote }}, path: key}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range .Values.tokenizers }}
- name: tokenizer-{{ .name }}
  {{- if .hub }}
  emptyDir: {sizeLimit: 1Gi}
  {{- else if .configMap }}
  configMap: {name: {{ .configMap.name }}}
  {{- else if .image }}
  image:
    {{- toYaml .image | nindent 4 }}
  {{- else if .persistentVolumeClaim }}
  persistentVolumeClaim: {claimName: {{ .persistentVolumeClaim.claimName }}, readOnly: true}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Init containers that download tokenizers from the hub. */}}
{{- define "warmroute.downloads" -}}
{{- range .Values.tokenizers }}
{{- if .hub }}
- name: tokenizer-{{ .name }}
  {{- include "warmroute.container" $ | nindent 2 }}
  command: [hf, download, {{ .hub.repository | quote }}, --revision, {{ default "main" .hub.revision | quote }}, --local-dir, /tokenizer]
  args: [--include, "tokenizer*", --include, "*.jinja", --include, "*.model", --include, "special_tokens_map.json", --include, "added_tokens.json", --include, "config.json"]
  env:
    - {name: HF_HOME, value: /tmp/huggingface}
    {{- with $.Values.hub.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $.Values.hub.tokenSecret }}
    {{- if .name }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key | quote }}}}}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 512Mi}
  volumeMounts:
    - {name: tokenizer-{{ .name }}, mountPath: /tokenizer}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end -}}
