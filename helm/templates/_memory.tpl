{{/* Bytes of a quantity such as 2Gi. */}}
{{- define "warmroute.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if kindIs "string" . -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]*$" .) | default 1) | int64 -}}
{{- else -}}
{{- int64 . -}}
{{- end -}}
{{- end -}}

{{/* Bytes that the routers' configuration allows a router to use: 512 MiB for code and tokenizers and, for each worker, the
buffered bodies and the replica of the shared index. The numbers are defaults of router.yaml. */}}
{{- define "warmroute.mostBytes" -}}
{{- $config := fromYaml (include "warmroute.config" .) -}}
{{- $each := dig "max_held_bytes" 1073741824 $config.limits | int64 -}}
{{- $redis := dig "index" "redis" (dict) $config | default dict -}}
{{- if $redis }}{{ $each = add $each (get $redis "max_replica_bytes" | default 2147483648 | int64) }}{{ end -}}
{{- add 536870912 (mul (dig "workers" 1 $config.listen) $each) -}}
{{- end -}}
