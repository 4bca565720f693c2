{{- define "embrace.labels" -}}
app.kubernetes.io/name: embrace
app.kubernetes.io/instance: {{ .Release.Name }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "embrace.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "embrace.adminSecret" -}}
{{ .Values.adminToken.secret | default (printf "%s-admin" .Release.Name) }}
{{- end }}

{{- define "embrace.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "embrace.container" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "embrace.stores" -}}
{{- if .Values.postgresql.enabled }}
- name: PGPASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.postgresql.secret }}, key: password}
- name: EMBRACE_DATABASE
  value: postgresql+psycopg://embrace@{{ .Release.Name }}-postgresql/embrace
{{- else }}
- name: EMBRACE_DATABASE
  valueFrom:
    secretKeyRef: {name: {{ .Values.database.secret }}, key: {{ .Values.database.key }}}
{{- end }}
- name: EMBRACE_BLOBS
  value: {{ .Values.blobs.url | quote }}
{{- with .Values.blobs.endpoint }}
- name: AWS_ENDPOINT_URL_S3
  value: {{ . | quote }}
{{- end }}
{{- with .Values.blobs.storageUrl }}
- name: EMBRACE_STORAGE_URL
  value: {{ . | quote }}
{{- end }}
{{- with .Values.blobs.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- end }}
