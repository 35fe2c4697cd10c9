{{/* Rules by namespace, `*` for the whole cluster: what the sources of `config.discovery.kubernetes` read. */}}
{{- define "warmroute.permissions" -}}
{{- $pods := dict "apiGroups" (list "") "resources" (list "pods") "verbs" (list "list" "watch") -}}
{{- $nodes := dict "apiGroups" (list "") "resources" (list "nodes") "verbs" (list "get") -}}
{{- $inference := dict "apiGroups" (list "inference.networking.k8s.io") "resources" (list "inferencepools") "verbs" (list "get") -}}
{{- $objectives := dict "apiGroups" (list "inference.networking.x-k8s.io" "llm-d.ai") "resources" (list "inferenceobjectives") "verbs" (list "list") -}}
{{- $rules := dict -}}
{{- range fromYamlArray (include "warmroute.sources" .) -}}
{{- $source := . -}}
{{- if not (dig "api" "url" "" $source) -}}
{{- range default (list $.Release.Namespace) $source.namespaces -}}
{{- $pool := ternary (list $inference $objectives) (list $inference) (and $.Values.picker.enabled (kindIs "map" $.Values.config.admission)) -}}
{{- $needed := ternary (concat (list $pods) $pool) (list $pods) (not (empty $source.inference_pool)) -}}
{{- $_ := set $rules . (concat (get $rules . | default list) $needed | uniq) -}}
{{- end -}}
{{- if dig "node_labels" true $source -}}
{{- $known := get $rules "*" | default list -}}
{{- if not (has $nodes $known) }}{{ $_ := set $rules "*" (append $known $nodes) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}
