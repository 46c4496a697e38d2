"""The pure core: values, facts, and the two functions that make a run out of them.

    apply(state, fact) -> state           `planner_ext.core.fold`: what happened becomes state
    next_action(state) -> action          `planner_ext.core.machine`: state becomes what to do next

Standard library only; no clock, no randomness, no IO, no logging, and nothing of Semantic Kernel.

Where is what
    The floors, from the bottom: ``core`` decides, ``approval`` says what binds a decision, ``engine`` performs and
    records, ``timeline`` draws pages, ``durable`` keeps runs in a store, ``sk`` adapts to Semantic Kernel. On these
    stand the doors and the other modules of the root, then ``compare``, ``cli`` and ``inbox``. ``testing`` scripts
    models. Paths below are relative to ``planner_ext``.

    a call                asked by the model: `RequestedCall` in ``core/values.py``; in the state: `Call` in
                          ``core/state.py``; as everybody outside sees it, waiting or not: `ToolCall` in
                          ``approval/decisions.py``, in a store its `PendingApproval`
    a deferred call       `Call.decided` with the verdict ``defer``: a `CallDecided` of the journal. `waiting_calls` in
                          ``approval/waiting.py`` finds those of a state, `pending_calls` shows them.
      ... without a store in the journal that a checkpoint holds: ``sk/checkpoint.py``
      ... of an agent     the last message of its thread says so; ``agent.py`` resumes or cancels the turn
      ... in a store      also a row of ``planner_approvals``: ``durable/writer.py`` opens it when the run pauses,
                          ``durable/records.py`` reads it
      a person's decision ``sk/run/resume.py``, `decision_facts`, makes it a fact. In a store it waits in the row,
                          where ``durable/approvals.py`` puts it, until ``durable/worker.py`` takes it.
    a limit is declared   ``core/limits.py``, `Budget`
      ... checked         `next_action` in ``core/machine.py``, given what is left: `Left` in ``core/limits.py``; what
                          functions and nested runs take: ``core/accounts.py``
      ... shared          ``budgets/budget.py``, `SharedBudget`; reserved by ``engine/shared.py`` before
      ... cuts a result   ``core/results.py``; `Recorder.record` in ``engine/journal.py`` notes where
      ... in flight       a limit of time interrupts: ``engine/journal.py``, `Recorder.in_time`
      ... raised          ``sk/run/outcome.py``, `raise_at_limit`
    what a journal tells  ``engine/timeline.py``, `TimelineReader`: iterations, calls with their outcomes, events;
                          drawn by ``timeline/page.py``
    an option             ``sk/run/options.py``, whose docstring lists what to edit; ``planner/options.py`` repeats it
    the journal's table   ``planner_journal``: created by ``durable/database.py``, written by ``durable/writer.py``,
                          read by ``durable/store.py``; ``durable/sqlite.py`` and ``durable/postgres.py`` hold it

Glossary
    door         A public entry point that prepares and drives runs: planner, service, handler or session.
    run          One goal or one chat request, from its first fact to its end. It may pause and be resumed.
    iteration    One request to the model, its reply, and the batch of calls in it; numbered from 0. The plan request
                 comes before iteration 0. ``iterations`` (plural) counts charged round trips: a connector may report
                 more than one for a request.
    round        An iteration with a batch that was completed. ``use_attempts`` counts rounds.
    step         The rounds of the planner between two step messages; `Rules.rounds_per_step` limits them.
    batch        The calls of one reply, until each has its result. At most one batch is open.
    usage        The one amount: round trips, calls, tokens, cost and seconds. `cost_of` in ``core/facts.py`` is what a
                 fact charges; `State.usage` is the sum.
    fact         Something that happened, as a frozen value. Facts are never changed or removed.
    journal      The facts of a run, in order. The state is the fold of the journal, so the journal is the only truth.
    activation   The work on a run in one process, from its start or resumption to its next pause or end. A process that
                 dies in between leaves the run to another activation.
    in doubt     A call that an earlier activation started and did not finish: it may have taken effect.
    pause        A run that waits for a person. It executes nothing; it is a value that can be stored.
    decision     What a person or an interceptor says about a call: approve, deny, supply a result, or defer.
    fingerprint  Digest of run, iteration, call, function, its signature and the arguments. A decision is valid only for
                 the call with its fingerprint.

The state
    `State.phase` says which facts may follow (`planner_ext.core.state.TRANSITIONS`). What the machine does in a phase
    depends on these fields, each of which is set by one fact and read by the machine until its consequence is done:

    field         set by                       consequence                                        cleared by
    ------------  ---------------------------  -------------------------------------------------  --------------------
    batch         ModelReplied with calls      its calls are reviewed, run and answered           its last result
    reply         ModelReplied without calls   it is judged: answer, question, close of a step    MessageAdded,
                                                                                                  Clarified, Resumed
    final_answer  CallDecided                  the other calls are withheld, the run ends         MessageAdded, resume
    stopping      StopRequested,               open calls are withheld, no further request, the   Resumed
                  IterationCompleted           run ends ``stopped``
    ending        CallFinished (a filter       no further call of the batch starts; becomes       end of the batch
                  terminates)                  ``stopping`` when the batch is complete
    limit         CallsWithheld for a limit    the next request offers no functions (``answer``)  Resumed with limits,
                                               or the run ends ``limit_reached``                  BudgetChanged
    refused       SharedBudgetsChecked         counts as a limit that is used up; without         SharedBudgetsChecked,
                                               ``answer`` no request follows                      Resumed, BudgetChanged
    intent        ModelAsked, RequestFailed    after a request that failed the next one is        any fact but those
                                               recorded before it is sent                         that may wait
    reask         a batch with a denied call   the next request offers no functions; no limit     ModelReplied
    step_rounds   IterationCompleted           at ``rounds_per_step`` the next request offers no  MessageAdded (step)
                                               functions and its reply closes the step
    rounds        IterationCompleted           at ``use_attempts`` no functions are offered;      resume of an ended run
                                               ``attempts_limit`` says whether that is a limit
    checked       AnswerChecked                an answer without problem ends the run, another    ModelReplied
                                               one is asked for again
    structuring   MessageAdded (structure)     every request asks for the answer in its form:     never; a resumed run
                                               no functions, no questions, no steps               counts as having asked
    asked         Clarified without an answer  the plain reply is not shown to the clarifier      ModelReplied
                                               again
    called        end of a batch               the iteration-completed callback is due            end of the next batch
    planned       Planned                      a resumed run does not ask for a plan again        never
    sticky        CallDecided (always)         the same question about later calls of the         never
                                               function, or with the same arguments, is answered
    ended         Ended                        nothing, until the run is resumed                  Resumed

Order
    Where several consequences are due, the first of this list is carried out:
    in a batch:   returned calls (denied, external), final answer, stopping, ending, no round trip left, calls that are
                  ready, questions for the clarifier, pause;
    in a request: final answer, answer in its form, stopping, limit, then `_request` decides what is offered.

What excludes what
    - ``batch`` and an unanswered ``reply`` are never set at once: phases REVIEWING and CALLING have a batch, ANSWERING
      has a reply, and a paused run has exactly one of them.
    - ``stopping`` wins over ``limit``: a run that is stopped ends ``stopped``. While it is set no request is made and
      no person is asked.
    - ``ending`` is cleared when its batch ends; it outlives the activation only if the run pauses or ends before.
    - ``structuring`` excludes steps and questions: only the answer, in its form, is still due.
    - ``checked`` and ``structuring`` are used only under `Rules.structured`, ``step_rounds`` only under
      `Rules.rounds_per_step`.
    - ``limit`` is the first limit that was reached; a later one does not replace it.
    - ``reask`` and a closing step withhold functions without a limit: a run that ends then is ``answered``.
"""
