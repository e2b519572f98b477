-- Tables and statements of the PostgreSQL store.
--
-- {jobs}: what is known of a job for ever. {runs}: one row for each run. {meta}: one row.
-- Instants are bigint milliseconds since the epoch, UTC; slots by the schedule, all others by
-- the database's clock. Text is ASCII, with the escapes of a Python string literal, so that it
-- fits into a database of any encoding.
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
-- Lists are given as arrays, one for each column, so that a batch is a few statements whatever its
-- size. Job keys compare by byte (COLLATE "C"), which is the order in which all replicas lock.

-- name: schema
CREATE TABLE IF NOT EXISTS {meta} (version integer NOT NULL);
CREATE TABLE IF NOT EXISTS {jobs} (
    job         text COLLATE "C" NOT NULL,
    name        text,
    first_seen  bigint,
    since       bigint NOT NULL,
    fingerprint text   NOT NULL,
    last_slot   bigint,
    floor       bigint NOT NULL,
    wins        bigint NOT NULL,
    confirmed   bigint,
    CONSTRAINT {jobs_pkey} PRIMARY KEY (job)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE TABLE IF NOT EXISTS {runs} (
    job         text COLLATE "C" NOT NULL,
    slot        bigint NOT NULL,
    state       text   NOT NULL,
    attempt     bigint NOT NULL,
    token       text   NOT NULL,
    lease_until bigint NOT NULL,
    attempts    bigint NOT NULL,
    late_at     bigint NOT NULL,
    forget_at   bigint NOT NULL,
    replica     text   NOT NULL,
    claimed     bigint NOT NULL,
    finished    bigint,
    worker      text   NOT NULL,
    started     bigint,
    leg         bigint NOT NULL,
    mark        text   NOT NULL,
    CONSTRAINT {runs_pkey} PRIMARY KEY (job, slot)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX IF NOT EXISTS {runs_lease} ON {runs} (lease_until) WHERE state IN ('running', 'queued');
CREATE INDEX IF NOT EXISTS {runs_alive} ON {runs} (job) WHERE state IN ('running', 'queued');
CREATE INDEX IF NOT EXISTS {runs_free} ON {runs} (lease_until) WHERE state = 'released';
INSERT INTO {meta} (version) SELECT {version} WHERE NOT EXISTS (SELECT FROM {meta});

-- name: grants
GRANT SELECT ON {meta} TO {role};
GRANT SELECT, INSERT, UPDATE ON {jobs} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {runs} TO {role};

-- name: create
BEGIN;
SET LOCAL statement_timeout = {statement_ms};
SET LOCAL lock_timeout = {lock_ms};
SELECT pg_advisory_xact_lock({lock_key});

-- name: version → version
SET LOCAL statement_timeout = {statement_ms};
SELECT max(version) FROM {meta};

-- name: now → the clock
SET LOCAL statement_timeout = {statement_ms};
SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- name: info → version, standby?, fsync, full_page_writes
SET LOCAL statement_timeout = {statement_ms};
SELECT current_setting('server_version'), pg_is_in_recovery(),
       current_setting('fsync'), current_setting('full_page_writes');

-- name: read_runs (asked, slots) → the clock, the columns of the run
SET LOCAL statement_timeout = {statement_ms};
{by_index}
SELECT (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint), r.*
FROM unnest(%(asked)s::text[], %(slots)s::bigint[]) AS k (job, slot)
JOIN {runs} AS r ON r.job = k.job COLLATE "C" AND r.slot = k.slot;

-- name: read_jobs (jobs) → the columns of the jobs
SET LOCAL statement_timeout = {statement_ms};
SELECT * FROM {jobs} WHERE job = ANY (%(jobs)s::text[]);

-- name: read_expired (limit) → the clock, whole name, the columns of the run
SET LOCAL statement_timeout = {statement_ms};
SELECT c.now, coalesce(j.name, j.job), r.*
FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now OFFSET 0) AS c
CROSS JOIN LATERAL (
    (SELECT * FROM {runs} WHERE state IN ('running', 'queued') AND lease_until < c.now
     ORDER BY lease_until LIMIT %(limit)s)
    UNION ALL
    (SELECT * FROM {runs} WHERE state = 'released' ORDER BY lease_until LIMIT %(limit)s)
) AS r
JOIN {jobs} AS j ON j.job = r.job ORDER BY r.lease_until LIMIT %(limit)s;

-- name: read_latest (job, limit) → whole name, the columns of the run
SET LOCAL statement_timeout = {statement_ms};
SELECT coalesce(j.name, j.job), r.* FROM {runs} AS r JOIN {jobs} AS j ON j.job = r.job
WHERE r.job = %(job)s ORDER BY r.slot DESC LIMIT %(limit)s;

-- name: read_latest_of_all (limit) → whole name, the columns of the run
SET LOCAL statement_timeout = {statement_ms};
SELECT coalesce(j.name, j.job), r.* FROM {runs} AS r JOIN {jobs} AS j ON j.job = r.job
ORDER BY r.slot DESC, r.job LIMIT %(limit)s;

-- name: begin: the time-outs end what a client that hangs would hold for ever
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL statement_timeout = {statement_ms};
SET LOCAL lock_timeout = {lock_ms};
SET LOCAL idle_in_transaction_session_timeout = {idle_ms};
SELECT set_config('synchronous_commit', 'on', true)
WHERE current_setting('synchronous_commit') = 'off';
{by_index}

-- name: lock_or_add (jobs, names): what is there is locked, though WHERE lets nothing be updated
INSERT INTO {jobs} AS j (job, name, since, fingerprint, floor, wins)
SELECT k.job, k.name, 0, '', 0, 0
FROM unnest(%(jobs)s::text[], %(names)s::text[]) AS k (job, name) ORDER BY k.job COLLATE "C"
ON CONFLICT (job) DO UPDATE SET wins = j.wins WHERE false;

-- name: lock (jobs)
SELECT FROM {jobs} WHERE job = ANY (%(jobs)s::text[]) ORDER BY job FOR NO KEY UPDATE;

-- name: load (asked, slots or nothing) → the clock, the columns of the job, of the run
SELECT (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint), j.*, r.*
FROM unnest(%(asked)s::text[], %(slots)s::bigint[]) AS k (job, slot)
JOIN {jobs} AS j ON j.job = k.job COLLATE "C"
LEFT JOIN {runs} AS r ON r.job = k.job COLLATE "C" AND r.slot = k.slot;

-- name: load_runs (asked, slots) → the clock, the columns of the run
SELECT (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint), r.*
FROM unnest(%(asked)s::text[], %(slots)s::bigint[]) AS k (job, slot)
JOIN {runs} AS r ON r.job = k.job COLLATE "C" AND r.slot = k.slot;

-- name: load_alive (alive) → the columns of the runs that are alive
SELECT * FROM {runs} WHERE job = ANY (%(alive)s::text[]) AND state IN ('running', 'queued');

-- name: write_schedules (schedules_*: the columns)
UPDATE {jobs} AS j
SET first_seen = k.first_seen, since = k.since, fingerprint = k.fingerprint
FROM unnest(
    %(schedules_job)s::text[], %(schedules_first_seen)s::bigint[],
    %(schedules_since)s::bigint[], %(schedules_fingerprint)s::text[]
) AS k (job, first_seen, since, fingerprint)
WHERE j.job = k.job COLLATE "C";

-- name: write_jobs (jobs_*: the columns)
UPDATE {jobs} AS j SET last_slot = k.last_slot, wins = k.wins, confirmed = k.confirmed
FROM unnest(
    %(jobs_job)s::text[], %(jobs_last_slot)s::bigint[], %(jobs_wins)s::bigint[],
    %(jobs_confirmed)s::bigint[]
) AS k (job, last_slot, wins, confirmed)
WHERE j.job = k.job COLLATE "C";

-- name: write_replaced (replaced_*: job, slot): write_new follows
DELETE FROM {runs} AS r
USING unnest(%(replaced_job)s::text[], %(replaced_slot)s::bigint[]) AS k (job, slot)
WHERE r.job = k.job COLLATE "C" AND r.slot = k.slot;

-- name: write_new (new_*: the columns; replica; now)
INSERT INTO {runs}
SELECT k.job, k.slot, k.state, k.attempt, k.token, k.lease_until, k.attempts, k.late_at,
       k.forget_at, %(replica)s, %(now)s, k.finished, '', NULL, 0, ''
FROM unnest(
    %(new_job)s::text[], %(new_slot)s::bigint[], %(new_state)s::text[], %(new_attempt)s::bigint[],
    %(new_token)s::text[], %(new_lease_until)s::bigint[], %(new_attempts)s::bigint[],
    %(new_late_at)s::bigint[], %(new_forget_at)s::bigint[], %(new_finished)s::bigint[]
) AS k (
    job, slot, state, attempt, token, lease_until, attempts, late_at, forget_at, finished
);

-- name: write_old (old_*: the columns that change in the course of an attempt)
UPDATE {runs} AS r
SET state = k.state, lease_until = k.lease_until, finished = k.finished, worker = k.worker,
    started = k.started, leg = k.leg, mark = k.mark
FROM unnest(
    %(old_job)s::text[], %(old_slot)s::bigint[], %(old_state)s::text[],
    %(old_lease_until)s::bigint[], %(old_finished)s::bigint[], %(old_worker)s::text[],
    %(old_started)s::bigint[], %(old_leg)s::bigint[], %(old_mark)s::text[]
) AS k (job, slot, state, lease_until, finished, worker, started, leg, mark)
WHERE r.job = k.job COLLATE "C" AND r.slot = k.slot;

-- name: prune (prune: [job]; now; offset: history - 1; step: at most so many of each job)
WITH edge AS (
    SELECT k.job, (SELECT r.slot FROM {runs} AS r WHERE r.job = k.job COLLATE "C"
                   ORDER BY r.slot DESC OFFSET %(offset)s LIMIT 1) AS slot
    FROM unnest(%(prune)s::text[]) AS k (job)
), old AS (
    SELECT o.job, o.slot FROM edge CROSS JOIN LATERAL (
        SELECT r.job, r.slot FROM {runs} AS r
        WHERE r.job = edge.job COLLATE "C" AND r.slot < edge.slot AND r.forget_at < %(now)s
          AND r.state NOT IN ('running', 'queued', 'released')
        ORDER BY r.slot LIMIT %(step)s
    ) AS o
), gone AS (
    DELETE FROM {runs} AS r USING old WHERE r.job = old.job AND r.slot = old.slot
    RETURNING r.job, r.slot
)
UPDATE {jobs} AS j SET floor = greatest(j.floor, g.slot)
FROM (SELECT job, max(slot) AS slot FROM gone GROUP BY job) AS g WHERE j.job = g.job;
