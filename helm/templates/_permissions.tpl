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

{{/* Rules by namespace: what `deletion_cost` writes. The Lease is in the first namespace of the pods. */}}
{{- define "warmroute.writes" -}}
{{- $pods := dict "apiGroups" (list "") "resources" (list "pods") "verbs" (list "patch") -}}
{{- $leases := dict "apiGroups" (list "coordination.k8s.io") "resources" (list "leases") "verbs" (list "get" "create" "patch") -}}
{{- $rules := dict -}}
{{- range fromYamlArray (include "warmroute.sources" .) -}}
{{- $source := . -}}
{{- if and $source.deletion_cost (not (dig "api" "url" "" $source)) -}}
{{- $namespaces := default (list $.Release.Namespace) $source.namespaces -}}
{{- range $namespaces -}}
{{- $_ := set $rules . (append (get $rules . | default list) $pods | uniq) -}}
{{- end -}}
{{- $home := ternary $.Release.Namespace (first $namespaces) (has "*" $namespaces) -}}
{{- $_ := set $rules $home (append (get $rules $home | default list) $leases | uniq) -}}
{{- end -}}
{{- end -}}
{{- toYaml $rules -}}
{{- end -}}
