BEGIN TRANSACTION;
CREATE TABLE planner_approvals (
        id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        status TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        call TEXT NOT NULL,
        asked_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION,
        decision TEXT,
        decided_at DOUBLE PRECISION,
        problem TEXT
    );
INSERT INTO "planner_approvals" VALUES('paused/0/call_1','paused','open','98d4a84502c8bce884e1407e6b68a6a81619970e3fbf5a36a8bd34924a0be754','{"iteration":0,"call_id":"call_1","function":"orders-refund","kind":"function","arguments":{"order":"A-1007"},"prompt":"May this money go back?","goal":"Refund A-1007.","in_doubt":false,"signature":"order=7470d7259f1f2244","parameters":{"type":"object","properties":{"order":{"type":"string"}},"required":["order"]}}',1.79537104468004345895e+09,NULL,NULL,NULL,NULL);
CREATE TABLE planner_journal (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        seq INTEGER NOT NULL,
        schema INTEGER NOT NULL,
        fact TEXT NOT NULL,
        PRIMARY KEY (run_id, seq)
    );
INSERT INTO "planner_journal" VALUES('paused',0,2,'{"run_id":"paused","rules":{"limits":{"max_iterations":15,"max_tool_calls":null,"max_total_tokens":null,"max_cost":null,"max_active_seconds":null,"deadline":null,"max_calls_per_function":{},"max_consecutive_errors":null,"max_repeated_calls":null,"max_repeated_denials":null,"max_calls_per_reply":1024,"on_limit":"answer","batch_over_limit":"reject_batch","last_trip":"withdraw","tell_budget":false},"plan":false,"charge_plan":true,"use_attempts":null,"attempts_limit":"maximum_use_attempts","tool_choice":"auto","rounds_per_step":null,"require_final_answer":false,"on_denial":"refuse","close_on_denial":false,"on_deferred":"hold_all","structured":false,"clarifier":false,"max_clarifications":null},"messages":[{"metadata":{},"content_type":"message","role":"user","items":[{"metadata":{},"content_type":"text","text":"Refund A-1007."}]}],"goal":"Refund A-1007.","guards":{"interceptors":[],"pre_invoke":[],"checks":[],"filters":[],"unmatched":"approve","expires_in":null,"marked":["orders-refund"]},"at":1795371044.678302,"type":"RunStarted"}');
INSERT INTO "planner_journal" VALUES('paused',1,2,'{"iteration":0,"message":{"ai_model_id":"scripted","metadata":{"logprobs":null,"id":"chatcmpl-0","created":1700000000,"system_fingerprint":"fp_scripted","usage":{"prompt_tokens":52,"completion_tokens":7}},"content_type":"message","role":"assistant","items":[{"metadata":{},"content_type":"function_call","id":"call_1","name":"orders-refund","function_name":"refund","plugin_name":"orders","arguments":"{\"order\":\"A-1007\"}"}],"finish_reason":"tool_calls"},"text":"","calls":[{"id":"call_1","name":"orders-refund","arguments":"{\"order\":\"A-1007\"}","sent_name":""}],"finish_reason":"tool_calls","usage":{"prompt_tokens":52,"completion_tokens":7,"cached_tokens":0,"cost":null,"active_seconds":0.0,"estimated_tokens":0},"iterations":1,"offered":true,"withheld":null,"final_answer":null,"at":1795371044.6792543,"seconds":0.00040156099930754863,"type":"ModelReplied"}');
INSERT INTO "planner_journal" VALUES('paused',2,2,'{"iteration":0,"index":0,"call_id":"call_1","function":"orders-refund","kind":"function","verdict":"defer","answer":"","reason":"","digest":"568deec5e8f8b6e0da33e1d8bffd583ed3bda5c79984f4e5e011f44f583fd34d","signature":"order=7470d7259f1f2244","fingerprint":"98d4a84502c8bce884e1407e6b68a6a81619970e3fbf5a36a8bd34924a0be754","arguments":null,"edited":null,"by":"","sticky":null,"expires_at":null,"prompt":"May this money go back?","final_answer":null,"person":false,"nested":false,"approved":false,"asks_model":false,"parameters":"{\"type\":\"object\",\"properties\":{\"order\":{\"type\":\"string\"}},\"required\":[\"order\"]}","at":1795371044.6799283,"type":"CallDecided"}');
INSERT INTO "planner_journal" VALUES('paused',3,2,'{"at":1795371044.6800435,"seconds":0.0007729300014034379,"type":"Paused"}');
CREATE TABLE planner_notices (
        id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL,
        event TEXT NOT NULL,
        body TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        next_at DOUBLE PRECISION,
        delivered_at DOUBLE PRECISION,
        problem TEXT
    );
CREATE TABLE planner_refusals (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        id TEXT NOT NULL,
        decision TEXT NOT NULL,
        problem TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL
    );
CREATE TABLE planner_runs (
        run_id TEXT PRIMARY KEY,
        goal TEXT NOT NULL,
        status TEXT NOT NULL,
        owner TEXT,
        wake_at DOUBLE PRECISION,
        created_at DOUBLE PRECISION NOT NULL,
        updated_at DOUBLE PRECISION NOT NULL
    , problem TEXT, retries INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0, progress INTEGER NOT NULL DEFAULT 0, iterations INTEGER NOT NULL DEFAULT 0, tool_calls INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0, cost DOUBLE PRECISION, inputs TEXT, new_budget TEXT);
INSERT INTO "planner_runs" VALUES('paused','"Refund A-1007."','paused',NULL,NULL,1.79537104466705226902e+09,1.79537104468004345895e+09,NULL,0,0,0,1,0,59,NULL,NULL,NULL);
INSERT INTO "planner_runs" VALUES('queued','"Say hello."','queued',NULL,NULL,1.79537104468091869352e+09,1.79537104468091869352e+09,NULL,0,0,0,0,0,0,NULL,NULL,NULL);
CREATE TABLE planner_schema (
        number INTEGER PRIMARY KEY
    );
INSERT INTO "planner_schema" VALUES(2);
CREATE TABLE planner_subscriptions (
        event TEXT PRIMARY KEY,
        until DOUBLE PRECISION NOT NULL
    );
CREATE TABLE planner_workers (
        worker_id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        status TEXT NOT NULL,
        concurrency INTEGER,
        started_at DOUBLE PRECISION NOT NULL,
        seen_at DOUBLE PRECISION NOT NULL
    );
CREATE INDEX planner_refusals_by_run ON planner_refusals (run_id);
CREATE INDEX planner_refusals_by_id ON planner_refusals (id);
CREATE INDEX planner_runs_by_status ON planner_runs (status, wake_at);
CREATE INDEX planner_approvals_by_status ON planner_approvals (status, asked_at, id);
CREATE INDEX planner_approvals_by_run ON planner_approvals (run_id);
CREATE INDEX planner_notices_by_next ON planner_notices (next_at);
CREATE INDEX planner_notices_by_run ON planner_notices (run_id);
CREATE INDEX planner_runs_by_update ON planner_runs (updated_at, run_id);
CREATE INDEX planner_runs_by_status_and_update ON planner_runs (status, updated_at, run_id);
CREATE INDEX planner_runs_by_owner ON planner_runs (owner);
COMMIT;
