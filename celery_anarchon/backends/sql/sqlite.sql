-- Tables of the SQLite store.
--
-- {jobs}: what is known of a job for ever. {runs}: one row for each run. {meta}: one row.
-- Instants are INTEGER milliseconds since the epoch, UTC; slots by the schedule, all others by
-- the clock of the host. TEXT is ASCII, with the escapes of a Python string literal.
--
-- {jobs}
--   job          key: the name; where that is longer than 255, cut and ending in its SHA-256
--   name         the whole name where job is not, else NULL
--   first_seen   when it was first registered, or NULL
--   since        from when its fingerprint counts
--   fingerprint  of its schedule, as last registered
--   last_slot    the latest slot ever claimed, or NULL
--   floor        runs at or before this slot may have been deleted: nobody wins them any more
--   wins         number of runs won
--   confirmed    when a worker first confirmed a run of it, or NULL
-- {runs}
--   job, slot    which run
--   state        running, queued, released, done, failed, interrupted, skipped, late
--   attempt      number of the latest attempt; token, replica, claimed: of that attempt
--   lease_until  last instant of the lease, or of the wait in a queue; where released, when it
--                was released
--   attempts     how many attempts it may have
--   late_at      last instant at which a released run may be claimed again
--   forget_at    last instant at which it must be remembered
--   finished     when it ended, or NULL
--   worker       the worker that began the latest attempt last, or empty
--   started      when it began it, or NULL
--   leg          0 until a worker begins the attempt, then counted on with each retry
--   mark         of the question by which the worker began this leg
-- {meta}
--   version      of this schema
--
-- Lists are given as one JSON array, so that a batch is a few statements whatever its size.

-- name: schema
CREATE TABLE IF NOT EXISTS {meta} (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS {jobs} (
    job         TEXT    NOT NULL PRIMARY KEY,
    name        TEXT,
    first_seen  INTEGER,
    since       INTEGER NOT NULL,
    fingerprint TEXT    NOT NULL,
    last_slot   INTEGER,
    floor       INTEGER NOT NULL,
    wins        INTEGER NOT NULL,
    confirmed   INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS {runs} (
    job         TEXT    NOT NULL,
    slot        INTEGER NOT NULL,
    state       TEXT    NOT NULL,
    attempt     INTEGER NOT NULL,
    token       TEXT    NOT NULL,
    lease_until INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    late_at     INTEGER NOT NULL,
    forget_at   INTEGER NOT NULL,
    replica     TEXT    NOT NULL,
    claimed     INTEGER NOT NULL,
    finished    INTEGER,
    worker      TEXT    NOT NULL,
    started     INTEGER,
    leg         INTEGER NOT NULL,
    mark        TEXT    NOT NULL,
    PRIMARY KEY (job, slot)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS {runs_lease} ON {runs} (lease_until) WHERE state IN ('running', 'queued');
CREATE INDEX IF NOT EXISTS {runs_alive} ON {runs} (job) WHERE state IN ('running', 'queued');
CREATE INDEX IF NOT EXISTS {runs_free} ON {runs} (lease_until) WHERE state = 'released';
INSERT INTO {meta} (version) SELECT {version} WHERE NOT EXISTS (SELECT 1 FROM {meta});

-- name: version → version
SELECT max(version) FROM {meta};

-- name: read_runs (1: [[job, slot], …]) → job and the columns of the run
SELECT r.* FROM json_each(?1) AS k CROSS JOIN {runs} AS r
ON r.job = json_extract(k.value, '$[0]') AND r.slot = json_extract(k.value, '$[1]');

-- name: read_alive (1: [job, …]) → job and the columns of the runs that are alive
SELECT r.* FROM json_each(?1) AS k CROSS JOIN {runs} AS r
ON r.job = k.value AND r.state IN ('running', 'queued');

-- name: read_jobs (1: [job, …]) → the columns of the jobs
SELECT j.* FROM json_each(?1) AS k CROSS JOIN {jobs} AS j ON j.job = k.value;

-- name: read_expired (1: now; 2: limit) → whole name and the columns of the run
SELECT coalesce(j.name, j.job), r.* FROM (
    SELECT * FROM (SELECT * FROM {runs} WHERE state IN ('running', 'queued') AND lease_until < ?1
                   ORDER BY lease_until LIMIT ?2)
    UNION ALL
    SELECT * FROM (SELECT * FROM {runs} WHERE state = 'released' ORDER BY lease_until LIMIT ?2)
) AS r JOIN {jobs} AS j ON j.job = r.job ORDER BY r.lease_until LIMIT ?2;

-- name: read_latest (1: job; 2: limit) → whole name and the columns of the run
SELECT coalesce(j.name, j.job), r.* FROM {runs} AS r JOIN {jobs} AS j ON j.job = r.job
WHERE r.job = ?1 ORDER BY r.slot DESC LIMIT ?2;

-- name: read_latest_of_all (1: limit) → whole name and the columns of the run
SELECT coalesce(j.name, j.job), r.* FROM {runs} AS r JOIN {jobs} AS j ON j.job = r.job
ORDER BY r.slot DESC, r.job LIMIT ?1;

-- name: write_jobs (1: [[column, …], …])
INSERT OR REPLACE INTO {jobs}
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
       json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]'),
       json_extract(value, '$[6]'), json_extract(value, '$[7]'), json_extract(value, '$[8]')
FROM json_each(?1);

-- name: write_new_runs (1: [[column up to forget_at, finished], …]; 2: replica; 3: now)
INSERT OR REPLACE INTO {runs}
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
       json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]'),
       json_extract(value, '$[6]'), json_extract(value, '$[7]'), json_extract(value, '$[8]'),
       ?2, ?3, json_extract(value, '$[9]'), '', NULL, 0, ''
FROM json_each(?1);

-- name: write_progress (1: [[job, slot, state, lease_until, finished, worker, started, leg, mark], …])
INSERT INTO {runs}
SELECT r.job, r.slot, json_extract(value, '$[2]'), r.attempt, r.token, json_extract(value, '$[3]'),
       r.attempts, r.late_at, r.forget_at, r.replica, r.claimed, json_extract(value, '$[4]'),
       json_extract(value, '$[5]'), json_extract(value, '$[6]'), json_extract(value, '$[7]'),
       json_extract(value, '$[8]')
FROM json_each(?1) AS k CROSS JOIN {runs} AS r
ON r.job = json_extract(k.value, '$[0]') AND r.slot = json_extract(k.value, '$[1]')
WHERE true
ON CONFLICT (job, slot) DO UPDATE
SET state = excluded.state, lease_until = excluded.lease_until, finished = excluded.finished,
    worker = excluded.worker, started = excluded.started, leg = excluded.leg,
    mark = excluded.mark;

-- name: forgettable (1: [job, …]; 2: now; 3: history; 4: limit) → job, slot
SELECT r.job, r.slot FROM json_each(?1) AS k CROSS JOIN {runs} AS r
ON r.job = k.value AND r.slot <
    (SELECT slot FROM {runs} WHERE job = k.value ORDER BY slot DESC LIMIT 1 OFFSET max(?3, 1) - 1)
WHERE r.forget_at < ?2 AND r.state NOT IN ('running', 'queued', 'released') LIMIT ?4;

-- name: forget (1: [[job, slot], …])
DELETE FROM {runs} WHERE (job, slot) IN
    (SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?1));
