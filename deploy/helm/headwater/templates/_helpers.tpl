{{- define "headwater.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "headwater.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headwater.labels" -}}
{{ include "headwater.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "headwater.keys" -}}
{{- if .Values.keys.content }}{{ include "headwater.name" . }}-keys{{ else }}{{ .Values.keys.secret }}{{ end -}}
{{- end }}

{{- define "headwater.scheme" -}}
{{- if .Values.tls.secret }}HTTPS{{ else }}HTTP{{ end -}}
{{- end }}

{{/* For proxies that must know that it is HTTP/2. */}}
{{- define "headwater.grpcProtocol" -}}
{{- if .Values.tls.secret }}https{{ else }}kubernetes.io/h2c{{ end -}}
{{- end }}

{{- define "headwater.readyPath" -}}
/v2/health/ready
{{- range $index, $model := .Values.ready.models }}{{ if $index }}&{{ else }}?{{ end }}model={{ $model | urlquery }}{{ end -}}
{{- end }}

{{/* Down by one a minute, and not because of a short pause: a new pod has to load its models first. */}}
{{- define "headwater.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: 300
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}

{{/* What values.schema.json can't say. */}}
{{- define "headwater.check" -}}
{{- with .Values.models }}
{{- if gt (len (compact (list .claim .hostPath .image))) 1 }}
{{- fail (printf "models: expected at most one of claim, hostPath and image, got %v: empty the others" .) }}
{{- end }}
{{- end }}
{{- if and .Values.keys.secret .Values.keys.content }}
{{- fail "keys: expected secret or content, got both: empty one" }}
{{- end }}
{{- if hasKey (.Values.config.server | default dict) "grpc_port" }}
{{- fail (printf "config.server.grpc_port: expected none, since the value grpc.enabled sets it and the ports of pods and Services together, got %v: set grpc.enabled instead" .Values.config.server.grpc_port) }}
{{- end }}
{{- if and .Values.grpc.enabled (eq (int .Values.grpc.port) (int .Values.service.port)) }}
{{- fail (printf "grpc.port: expected another port than service.port, got %v for both" .Values.grpc.port) }}
{{- end }}
{{- with .Values.shutdown }}
{{- $needed := add .preStopSeconds .drainDelaySeconds .timeoutSeconds 15 }}
{{- if lt (int .gracePeriodSeconds) (int $needed) }}
{{- fail (printf "shutdown.gracePeriodSeconds: expected at least %d (preStopSeconds, drainDelaySeconds, timeoutSeconds, and 15 for the replicas to end), got %v: raise it, or requests are cut off" $needed .gracePeriodSeconds) }}
{{- end }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (include "headwater.keys" .) (not .Values.serviceMonitor.key.secret) }}
{{- fail "serviceMonitor.key.secret: expected a Secret with a key of scope metrics, got none: where keys are required, /metrics answers 401 without one" }}
{{- end }}
{{- if ne .Values.autoscaling.engine "none" }}
{{- if gt (int .Values.autoscaling.min) (int .Values.autoscaling.max) }}
{{- fail (printf "autoscaling.min: expected at most autoscaling.max (%v), got %v" .Values.autoscaling.max .Values.autoscaling.min) }}
{{- end }}
{{- range $name, $deployment := .Values.config.deployments }}
{{- if kindIs "map" $deployment.replicas }}
{{- fail (printf "config.deployments.%s.replicas: expected a number, since pods are scaled (autoscaling.engine: %s) and two autoscalers would work against each other, got %v" $name $.Values.autoscaling.engine $deployment.replicas) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
