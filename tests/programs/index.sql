-- A table of ROWS rows in memory, two indexes on it, look-ups, updates, a join and a vacuum.
PRAGMA temp_store = memory;
CREATE TABLE item (id INTEGER PRIMARY KEY, code INTEGER, name TEXT, body BLOB);
INSERT INTO item
  WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ROWS)
  SELECT i, (i * 2654435761) % 1000000007, printf('name %09d', (i * 40503) % 999983), printf('%0200d', i * 77777)
  FROM n;
CREATE INDEX by_code ON item (code);
CREATE INDEX by_name ON item (name, code);
SELECT count(*), sum(code), min(name), max(name) FROM item;
SELECT id, code FROM item ORDER BY code LIMIT 5;
SELECT sum(a.id % 1000), count(*) FROM item a JOIN item b ON b.code = a.code WHERE a.id % 7 = 0;
UPDATE item SET code = code + 1 WHERE id % 5 = 0;
DELETE FROM item WHERE id % 11 = 0;
SELECT count(*), sum(length(body)), sum(code) FROM item WHERE name > 'name 000500000';
SELECT substr(name, 1, 7) AS part, count(*), sum(code) FROM item GROUP BY part ORDER BY part LIMIT 10;
PRAGMA integrity_check;
