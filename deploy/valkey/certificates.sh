#!/bin/sh
# Make an authority and a certificate of the server, for TLS between services that you run yourself:
#   sh deploy/valkey/certificates.sh deploy/certificates valkey localhost
# The first argument is the folder, the others are the names by which clients reach the server. Keep ca.key away from
# the servers; run it again before the year is over: with the same ca.key, clients need nothing new.
set -eu
umask 077
FOLDER=${1:?the folder of the certificates is missing}
shift
[ $# -gt 0 ] || { echo 'the names of the server are missing' >&2; exit 2; }
mkdir -p "$FOLDER"
cd "$FOLDER"
names=$(printf 'DNS:%s,' "$@")
new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }
if [ ! -s ca.key ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -subj /CN=perdure-authority -days 3650 -out ca.crt
fi
new_key server.key
openssl req -new -key server.key -subj "/CN=$1" -out server.csr
printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "${names%,}" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.crt 2> openssl.log \
    || { cat openssl.log >&2; exit 1; }
rm -f server.csr server.ext openssl.log
chmod 644 ca.crt server.crt
