#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes what a cluster keeps secret, in a new folder, with OpenSSL 3:
#
#     deploy/make-secrets.sh FOLDER NAME...
#
# NAMEs are the host names (*.x.y.z for all below) and addresses at which the cache server and the
# nodes are reached; the certificates are for all of them, for a year.
#
#     token                    of the cache server, for its nodes
#     ca.crt, ca.key           the authority; ca.key is needed again only for more certificates
#     cache.crt, cache.key     certificate and key of the cache server
#     node.crt, node.key       of the nodes, where they speak HTTPS
#     api-key                  what clients send
#     tenant-secret            separates these blocks from those of other clusters
#     admin-key                what /nodes of the proxy asks for
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

# A certificate and its key; openssl says much, which counts only if it fails.
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
