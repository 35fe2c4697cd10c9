{{/* The ports in a Redis URL as a JSON list: redis://host[:port][,host[:port]..][/database]. */}}
{{- define "warmroute.redisPorts" -}}
{{- $ports := list -}}
{{- $hosts := . | trimPrefix "rediss://" | trimPrefix "redis://" | splitList "@" | last | splitList "/" | first -}}
{{- range splitList "," $hosts -}}
{{- $port := regexFind ":[0-9]+$" . | trimPrefix ":" | default "6379" | int -}}
{{- if not (has $port $ports) }}{{ $ports = append $ports $port }}{{ end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}
