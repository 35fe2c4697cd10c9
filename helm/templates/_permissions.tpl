{{/* Rules by namespace, `*` for the whole cluster: what the sources of `config.discovery.kubernetes` read. */}}
{{- define "warmroute.permissions" -}}
{{- $pods := dict "apiGroups" (list "") "resources" (list "pods") "verbs" (list "list" "watch") -}}
{{- $slices := dict "apiGroups" (list "discovery.k8s.io") "resources" (list "endpointslices") "verbs" (list "list" "watch") -}}
{{- $nodes := dict "apiGroups" (list "") "resources" (list "nodes") "verbs" (list "get") -}}
{{- $rules := dict -}}
{{- range fromYamlArray (include "warmroute.sources" .) -}}
{{- $source := . -}}
{{- if not (dig "api" "url" "" $source) -}}
{{- range default (list $.Release.Namespace) $source.namespaces -}}
{{- $rule := ternary $slices $pods (not (empty $source.service)) -}}
{{- $known := get $rules . | default list -}}
{{- if not (has $rule $known) }}{{ $_ := set $rules . (append $known $rule) }}{{ end -}}
{{- end -}}
{{- if dig "node_labels" true $source -}}
{{- $known := get $rules "*" | default list -}}
{{- if not (has $nodes $known) }}{{ $_ := set $rules "*" (append $known $nodes) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}
