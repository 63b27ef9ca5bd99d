#!/bin/sh
# Print passwords for compose.yaml, which reads them from the file .env beside it:
#   sh deploy/secrets.sh > deploy/.env && chmod 600 deploy/.env
set -eu
for name in WORKER OPERATOR VIEWER PRODUCER GRAFANA; do
    echo "${name}_PASSWORD=$(od -An -N 24 -t x1 /dev/urandom | tr -d ' \n')"
done
