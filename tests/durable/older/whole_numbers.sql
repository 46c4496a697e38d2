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
INSERT INTO "planner_approvals" VALUES('old/0/pay','old','open','9b296d7fc59d7cdc69cae2728dbac1db972d1b906009da30950bf110aae55f7b','{"iteration":0,"call_id":"pay","function":"bank-pay","kind":"function","arguments":{"account":7,"amount":50.0},"prompt":"","goal":"Pay.","in_doubt":false}',1.79533792141246366499e+09,NULL,NULL,NULL,NULL);
CREATE TABLE planner_journal (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        seq INTEGER NOT NULL,
        schema INTEGER NOT NULL,
        fact TEXT NOT NULL,
        PRIMARY KEY (run_id, seq)
    );
INSERT INTO "planner_journal" VALUES('old',0,1,'{"run_id":"old","rules":{"limits":{"max_iterations":15,"max_tool_calls":null,"max_total_tokens":null,"max_cost":null,"max_active_seconds":null,"deadline":null,"max_calls_per_function":{},"max_consecutive_errors":null,"max_repeated_calls":null,"max_repeated_denials":null,"on_limit":"answer","batch_over_limit":"reject_batch","last_trip":"withdraw","tell_budget":false},"plan":false,"charge_plan":true,"use_attempts":null,"attempts_limit":"maximum_use_attempts","tool_choice":"auto","rounds_per_step":null,"require_final_answer":false,"on_denial":"refuse","close_on_denial":false,"on_deferred":"hold_all","structured":false,"clarifier":false,"max_clarifications":null},"messages":[{"metadata":{},"content_type":"message","role":"user","items":[{"metadata":{},"content_type":"text","text":"Pay."}]}],"goal":"Pay.","at":1795337921.409646,"type":"RunStarted"}');
INSERT INTO "planner_journal" VALUES('old',1,1,'{"iteration":0,"message":{"ai_model_id":"scripted","metadata":{"logprobs":null,"id":"chatcmpl-0","created":1700000000,"system_fingerprint":"fp_scripted","usage":{"prompt_tokens":60,"completion_tokens":8}},"content_type":"message","role":"assistant","items":[{"metadata":{},"content_type":"function_call","id":"pay","name":"bank-pay","function_name":"pay","plugin_name":"bank","arguments":"{\"account\":7,\"amount\":50.0}"}],"finish_reason":"tool_calls"},"text":"","calls":[{"id":"pay","name":"bank-pay","arguments":"{\"account\":7,\"amount\":50.0}"}],"finish_reason":"tool_calls","usage":{"prompt_tokens":60,"completion_tokens":8,"cached_tokens":0,"cost":null,"active_seconds":0.0},"iterations":1,"offered":true,"withheld":null,"final_answer":null,"at":1795337921.4112647,"seconds":0.0005712919992220122,"type":"ModelReplied"}');
INSERT INTO "planner_journal" VALUES('old',2,1,'{"iteration":0,"index":0,"call_id":"pay","function":"bank-pay","kind":"function","verdict":"defer","answer":"","reason":"","digest":"757395ddd243f6f8797abbb57b4de665d89525041d5fc77391010b97a7a35c94","fingerprint":"9b296d7fc59d7cdc69cae2728dbac1db972d1b906009da30950bf110aae55f7b","edited":null,"by":"","sticky":null,"expires_at":null,"prompt":"","final_answer":null,"person":false,"nested":false,"at":1795337921.412311,"type":"CallDecided"}');
INSERT INTO "planner_journal" VALUES('old',3,1,'{"at":1795337921.4124637,"seconds":0.0011985890005234978,"type":"Paused"}');
CREATE TABLE planner_runs (
        run_id TEXT PRIMARY KEY,
        goal TEXT NOT NULL,
        status TEXT NOT NULL,
        owner TEXT,
        wake_at DOUBLE PRECISION,
        created_at DOUBLE PRECISION NOT NULL,
        updated_at DOUBLE PRECISION NOT NULL
    );
INSERT INTO "planner_runs" VALUES('old','"Pay."','paused',NULL,NULL,1.79533792140760421751e+09,1.79533792141246366499e+09);
CREATE TABLE planner_schema (
        number INTEGER PRIMARY KEY
    );
INSERT INTO "planner_schema" VALUES(1);
CREATE INDEX planner_runs_by_status ON planner_runs (status, wake_at);
CREATE INDEX planner_approvals_by_status ON planner_approvals (status, asked_at, id);
CREATE INDEX planner_approvals_by_run ON planner_approvals (run_id);
COMMIT;
