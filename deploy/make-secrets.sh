#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the keys, tokens and certificates of a cluster, in a new folder, with OpenSSL 3:
#
#     deploy/make-secrets.sh FOLDER NAME...
#
# NAMEs are the host names (*.x.y.z for all names below x.y.z) and addresses of the cache server and
# the nodes; each certificate is valid for all NAMEs, for a year.
#
#     token                    what the nodes send to the cache server
#     ca.crt, ca.key           certificate authority; ca.key is only needed for new certificates
#     cache.crt, cache.key     certificate and key of the cache server
#     node.crt, node.key       certificate and key of the nodes, for HTTPS
#     api-key                  key that clients send
#     tenant-secret            separates the cluster's blocks from those of other clusters
#     admin-key                key for the route /nodes of the proxy
set -eu
umask 077
if [ $# -lt 2 ]; then
    echo "usage: $0 FOLDER NAME..." >&2
    exit 2
fi
folder=$1
shift
mkdir -- "$folder"
cd -- "$folder"

names=
for name in "$@"; do
    case $name in
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    names=${names:+$names,}$kind:$name
done

# Makes a certificate and its key; the output of openssl is shown only if openssl fails.
certificate() {
    file=$1
    shift
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc "$@" \
        -keyout "$file.key" -out "$file.crt" 2>errors || { cat errors >&2; exit 1; }
    rm errors
}

certificate ca -days 3650 -subj "/CN=StrataKV CA" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
for part in cache node; do
    certificate $part -CA ca.crt -CAkey ca.key -days 365 -subj "/CN=StrataKV $part" \
        -addext "basicConstraints=critical,CA:FALSE" -addext "subjectAltName=$names"
done
for secret in token api-key tenant-secret admin-key; do
    openssl rand -hex 32 | tr -d '\n' >$secret
done
