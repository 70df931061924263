#!/bin/sh
# A cluster of its own: initdb, pgbench with four clients, and queries that sort and hash rows: INITDB ROWS.
set -eu
# It does not run as root; in a user namespace root has another number.
if [ "$(id -u)" = 0 ]; then
    exec unshare --user --map-user=1000 --map-group=1000 sh "$0" "$@"
fi
PATH=$(dirname "$1"):$PATH
rows=$2
here=$(mktemp -d)
trap 'pg_ctl -D "$here/data" -m immediate stop >/dev/null 2>&1 || true; rm -rf "$here"' EXIT
initdb -D "$here/data" -U bench --no-sync --locale=C >/dev/null
pg_ctl -D "$here/data" -l "$here/log" -w -t 300 start \
    -o "-k $here -c listen_addresses='' -c shared_buffers=1MB -c work_mem=1GB -c fsync=off -c max_parallel_workers=0" >/dev/null
export PGHOST="$here" PGUSER=bench PGDATABASE=postgres
pgbench -i -q -s 1 >/dev/null 2>&1
cat >"$here/query" <<END
SELECT md5(string_agg(h, '')) FROM (SELECT md5(i::text) AS h FROM generate_series(1, $rows) AS i ORDER BY h) AS t;
SELECT count(*) FROM (SELECT md5((i % ($rows / 2))::text) AS h, count(*) FROM generate_series(1, $rows) AS i GROUP BY h) AS t;
END
pgbench -n -c 4 -j 1 -t 3 -f "$here/query" >/dev/null
pgbench -n -c 4 -j 1 -t 100 --random-seed=1 >/dev/null
psql -At -f "$here/query"
psql -At -c 'SELECT sum(abalance), count(*) FROM pgbench_accounts' -c 'SELECT sum(tbalance) FROM pgbench_tellers' \
    -c 'SELECT sum(bbalance) FROM pgbench_branches' -c 'SELECT count(*), sum(delta) FROM pgbench_history'
pg_ctl -D "$here/data" -m fast -w -t 300 stop >/dev/null
