{{/* Puts authority and certificate into the root's `selfSigned`, once: every call of the generators gives another one.
What is in the cluster is kept; the certificate is made anew, by the same authority, if its names have changed or half
of its time has passed. */}}
{{- define "bamboo.selfSigned" -}}
{{- if not (hasKey . "selfSigned") -}}
{{- $name := include "bamboo.fullname" . -}}
{{- $days := int .Values.tls.selfSigned.days -}}
{{- $dns := include "bamboo.dnsNames" . | fromJsonArray -}}
{{- $names := concat $dns .Values.tls.ipAddresses | join "," -}}
{{- $now := now | unixEpoch | int64 -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (printf "%s-tls" $name) | default dict -}}
{{- $oldCa := lookup "v1" "Secret" .Release.Namespace (printf "%s-ca" $name) | default dict -}}
{{- $notes := dig "metadata" "annotations" dict $old -}}
{{- $ca := dict -}}
{{- if $oldCa.data -}}
{{- $ca = buildCustomCert (index $oldCa.data "tls.crt") (index $oldCa.data "tls.key") -}}
{{- else -}}
{{- $ca = genCAWithKey (printf "%s authority" $name) (int .Values.tls.selfSigned.caDays) (genPrivateKey "ecdsa") -}}
{{- end -}}
{{- $found := dict "caCert" (b64enc $ca.Cert) "caKey" (b64enc $ca.Key) "names" $names -}}
{{- $current := and $oldCa.data $old.data (eq (get $notes "bamboo.dev/names") $names)
                    (lt $now (get $notes "bamboo.dev/renew-after" | int64)) -}}
{{- if $current -}}
{{- $_ := set $found "cert" (index $old.data "tls.crt") -}}
{{- $_ := set $found "key" (index $old.data "tls.key") -}}
{{- $_ := set $found "renewAfter" (get $notes "bamboo.dev/renew-after") -}}
{{- else -}}
{{- $made := genSignedCertWithKey $name .Values.tls.ipAddresses $dns $days $ca (genPrivateKey "ecdsa") -}}
{{- $_ := set $found "cert" (b64enc $made.Cert) -}}
{{- $_ := set $found "key" (b64enc $made.Key) -}}
{{- $_ := set $found "renewAfter" (add $now (mul $days 43200) | toString) -}}
{{- end -}}
{{- $_ := set . "selfSigned" $found -}}
{{- end -}}
{{- end -}}
