// A CopilotKit chat on a kept run: calls that this user may decide are cards, and a reload shows the whole thread.
//
//     npm install && npm start        and samples/step19_ag_ui.py beside it; then open http://localhost:3000
import { HttpAgent } from "@ag-ui/client";
import {
  CopilotChat,
  CopilotKitProvider,
  useCopilotKit,
  useDefaultRenderTool,
  useInterrupt,
} from "@copilotkit/react-core/v2";
import "@copilotkit/react-core/v2/styles.css";
import { useEffect, useState } from "react";
import { createRoot } from "react-dom/client";

const given = new URLSearchParams(location.search);
const url = given.get("agent") ?? "http://localhost:8000/agent";
const thread = given.get("thread") ?? (localStorage.thread ??= crypto.randomUUID());

class KeptAgent extends HttpAgent {
  connect(input) {
    return this.run(input); // what CopilotKit asks when the page is loaded: an input without a message
  }
}

const agent = new KeptAgent({ url, threadId: thread });

function Question({ interrupt, answer }) {
  const [text, setText] = useState("");
  return (
    <form className="card" onSubmit={(event) => (event.preventDefault(), answer({ answer: text }))}>
      <label>
        {interrupt.message} <textarea value={text} onChange={(event) => setText(event.target.value)} />
      </label>
      <button>Answer</button>
    </form>
  );
}

function Call({ interrupt, answer }) {
  const { function: name, arguments: given } = interrupt.metadata.planner_ext;
  const [text, setText] = useState(JSON.stringify(given, null, 2));
  const [problem, setProblem] = useState("");
  const approve = () => {
    try {
      const editedArgs = JSON.parse(text);
      const isEdited = JSON.stringify(editedArgs) !== JSON.stringify(given);
      answer(isEdited ? { approved: true, editedArgs } : { approved: true });
    } catch (error) {
      setProblem(error.message);
    }
  };
  return (
    <section className="card" aria-label={name}>
      <label>
        {interrupt.message} {name} <textarea rows="4" value={text} onChange={(event) => setText(event.target.value)} />
      </label>
      {problem && <p role="alert">{problem}</p>}
      <button onClick={approve}>Approve</button>
      <button onClick={() => answer({ approved: false })}>Deny</button>
    </section>
  );
}

function Card({ interrupt, resolve }) {
  const [isAnswered, setAnswered] = useState(false);
  const answer = (payload) => (setAnswered(true), resolve(payload, interrupt.id)); // sent once all are answered
  const Kind = interrupt.reason === "input_required" ? Question : Call;
  return isAnswered ? <p className="card">{interrupt.message} Answered.</p> : <Kind {...{ interrupt, answer }} />;
}

// While only others can decide what waits, a second connection shows when they have; the chat stays usable.
const onlyOthersDecide = ({ event, outcome }) =>
  outcome === "success" && event.metadata.planner_ext.status === "paused";

function useFollowing() {
  const { copilotkit } = useCopilotKit();
  useEffect(() => {
    let watch;
    const reconnect = () => (watch.abortRun(), copilotkit.connectAgent({ agent }));
    const follow = () => {
      watch = new KeptAgent({ url, threadId: thread });
      const onRunFinishedEvent = (end) => (onlyOthersDecide(end) ? follow() : reconnect());
      watch.runAgent({ forwardedProps: { follow: true } }, { onToolCallResultEvent: reconnect, onRunFinishedEvent });
    };
    const subscription = agent.subscribe({
      onRunInitialized: () => watch?.abortRun(),
      onRunFinishedEvent: (end) => onlyOthersDecide(end) && follow(),
    });
    return () => (subscription.unsubscribe(), watch?.abortRun());
  }, [copilotkit]);
}

function Chat() {
  useFollowing();
  useDefaultRenderTool({
    render: ({ name, parameters, result }) => (
      <details className="card">
        <summary>
          {name} {result === undefined ? "…" : `→ ${result}`}
        </summary>
        {JSON.stringify(parameters)}
      </details>
    ),
  });
  useInterrupt({
    render: ({ interrupts, resolve }) => (
      <div>
        {interrupts.map((interrupt) => (
          <Card key={interrupt.id} {...{ interrupt, resolve }} />
        ))}
      </div>
    ),
  });
  const [problem, setProblem] = useState("");
  return (
    <>
      {problem && <p role="alert">{problem}</p>}
      <CopilotChat threadId={thread} onError={({ error }) => setProblem(error.message)} />
    </>
  );
}

createRoot(document.getElementById("root")).render(
  <CopilotKitProvider agents__unsafe_dev_only={{ default: agent }} showDevConsole={false} enableInspector={false}>
    <Chat />
  </CopilotKitProvider>,
);
