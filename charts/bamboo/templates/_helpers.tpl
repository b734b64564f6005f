{{- define "bamboo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "bamboo-operator" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else if contains "bamboo" .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-bamboo-operator" (.Release.Name | trunc 34 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "bamboo.selector" -}}
app.kubernetes.io/name: bamboo-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "bamboo.labels" -}}
{{ include "bamboo.selector" . }}
app.kubernetes.io/part-of: bamboo
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "bamboo.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "bamboo.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* An image by digest or tag: dict image, version. */}}
{{- define "bamboo.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .version) -}}
{{- end -}}
{{- end -}}

{{/* in YAML, Off without quotes is false. */}}
{{- define "bamboo.tlsMode" -}}
{{- ternary "Off" .Values.tls.mode (eq (toString .Values.tls.mode) "false") -}}
{{- end -}}

{{- define "bamboo.tlsSecret" -}}
{{- if eq (include "bamboo.tlsMode" .) "Secret" -}}
{{- .Values.tls.existingSecret -}}
{{- else -}}
{{- printf "%s-tls" (include "bamboo.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "bamboo.keySecret" -}}
{{- .Values.key.existingSecret | default (printf "%s-key" (include "bamboo.fullname" .)) -}}
{{- end -}}

{{- define "bamboo.host" -}}
{{- printf "%s.%s.svc" (include "bamboo.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "bamboo.url" -}}
{{- $scheme := ternary "ws" "wss" (eq (include "bamboo.tlsMode" .) "Off") -}}
{{- .Values.url | default (printf "%s://%s:8765" $scheme (include "bamboo.host" .)) -}}
{{- end -}}

{{/* The DNS names in the certificate, as JSON. */}}
{{- define "bamboo.dnsNames" -}}
{{- $name := include "bamboo.fullname" . -}}
{{- $host := include "bamboo.host" . -}}
{{- $own := list $host (printf "%s.%s" $name .Release.Namespace) $name -}}
{{- concat $own .Values.tls.dnsNames | uniq | toJson -}}
{{- end -}}

{{/* The operator's rules as a YAML list, out of the file that is also used without Helm: dict root, scope.
scope: All; Cluster: what cannot be had in a namespace; Namespace: the others. */}}
{{- define "bamboo.rules" -}}
{{- $cluster := list "nodes" "namespaces" "customresourcedefinitions" "tokenreviews" "subjectaccessreviews" -}}
{{- $root := .root -}}
{{- $scope := .scope -}}
{{- $kept := list -}}
{{- range splitList "\n---\n" ($root.Files.Get "linked/rbac.yaml") -}}
{{- $object := fromYaml . -}}
{{- if eq $object.kind "ClusterRole" -}}
{{- range $object.rules -}}
{{- $resource := first .resources -}}
{{- $unused := and (eq $resource "networkpolicies") (not $root.Values.networkPolicy.workers) -}}
{{- $unused = or $unused (and (eq $resource "poddisruptionbudgets") (not $root.Values.workers.disruptionBudgets)) -}}
{{- $wanted := or (eq $scope "All") (eq $scope (ternary "Cluster" "Namespace" (has $resource $cluster))) -}}
{{- if and $wanted (not $unused) -}}
{{- $kept = append $kept . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* Replicas prefer different nodes. */}}
{{- define "bamboo.affinity" -}}
{{- $affinity := .Values.affinity | default dict -}}
{{- if and (gt (int .Values.replicas) 1) (not $affinity.podAntiAffinity) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "bamboo.selector" . | fromYaml)) -}}
{{- $apart := dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- $affinity = merge (dict "podAntiAffinity" $apart) $affinity -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* What the schema of the values cannot say. */}}
{{- define "bamboo.check" -}}
{{- $mode := include "bamboo.tlsMode" . -}}
{{- if and (eq $mode "Secret") (not .Values.tls.existingSecret) -}}
{{- fail "tls.existingSecret: expected the name of a Secret with tls.crt, tls.key and ca.crt, for tls.mode is Secret" -}}
{{- end -}}
{{- if and (eq $mode "CertManager") (not (.Capabilities.APIVersions.Has "cert-manager.io/v1")) -}}
{{- fail "tls.mode: CertManager needs cert-manager, and this cluster has no cert-manager.io/v1; install it, or choose SelfSigned or Secret" -}}
{{- end -}}
{{- if .Values.url -}}
{{- $scheme := ternary "ws://" "wss://" (eq $mode "Off") -}}
{{- if not (hasPrefix $scheme .Values.url) -}}
{{- fail (printf "url: expected %sHOST:PORT, for tls.mode is %s, got %q" $scheme $mode .Values.url) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.enabled (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail "monitoring.enabled: needs the Prometheus operator, and this cluster has no monitoring.coreos.com/v1; install it first, or set monitoring.enabled to false" -}}
{{- end -}}
{{- range $index, $mark := .Values.nodeMarks -}}
{{- $places := list -}}
{{- range list "taint" "label" "annotation" "condition" -}}
{{- if index $mark . -}}
{{- $places = append $places . -}}
{{- end -}}
{{- end -}}
{{- if ne (len $places) 1 -}}
{{- fail (printf "nodeMarks[%d]: expected exactly one of taint, label, annotation and condition, got %s" $index (join " and " $places | default "none")) -}}
{{- end -}}
{{- if eq (not $mark.noticeSeconds) (not $mark.gone) -}}
{{- fail (printf "nodeMarks[%d]: expected noticeSeconds or gone: true, got %s" $index (ternary "both" "neither" (not (not $mark.gone)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
