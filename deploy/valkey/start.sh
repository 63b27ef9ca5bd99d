#!/bin/sh
# Start Valkey with the users of users.acl. The password of user NAME is the content of $SECRETS/NAME-password; a user
# without such a file is left out. Arguments are passed on to the server.
set -eu
umask 077
HERE=$(dirname "$0")
SECRETS=${SECRETS:-/run/secrets}
USERS=${USERS:-/tmp/users.acl}
while read -r word name rest; do
    [ "$word" = user ] || continue
    case $name in
        default | health)
            echo "user $name $rest"
            ;;
        *)
            [ -s "$SECRETS/$name-password" ] || continue
            hash=$(tr -d '\n' < "$SECRETS/$name-password" | sha256sum | cut -d ' ' -f 1)
            echo "user $name #$hash $rest"
            ;;
    esac
done < "$HERE/users.acl" > "$USERS"
exec "${SERVER:-valkey-server}" "$HERE/valkey.conf" --aclfile "$USERS" "$@"
