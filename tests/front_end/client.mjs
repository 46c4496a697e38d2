// Drives a service with the AG-UI client of a package: node client.mjs FOLDER PACKAGE URL < steps.json
// A step is {say}, {answers}, {result} of the last call, or {} to look. Prints, for each, what the client understood; whatever it warns of is in it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, name, url] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/`));
const warnings = [];
console.warn = console.error = (...words) => warnings.push(words.map(String).join(" "));
const { HttpAgent } = require(name);

const agent = new HttpAgent({ url, threadId: "thread" });
const done = [];
const parameters = { type: "object", properties: { colour: { type: "string" } } };
const tools = [{ name: "colour", description: "Colours the page.", parameters }];
for (const { say, answers, result } of JSON.parse(readFileSync(0, "utf-8"))) {
  if (say) agent.addMessage({ id: crypto.randomUUID(), role: "user", content: say });
  const toolCallId = agent.messages.at(-1)?.toolCalls?.at(-1).id;
  if (result) agent.addMessage({ id: crypto.randomUUID(), role: "tool", toolCallId, content: result });
  const resume = answers?.map((payload, place) => ({
    interruptId: agent.pendingInterrupts[place].id,
    status: "resolved",
    payload,
  }));
  const seen = { types: [], outcome: null, error: null };
  const watch = {
    onEvent: ({ event }) => void seen.types.push(event.type),
    onRunFinishedEvent: ({ outcome }) => void (seen.outcome = outcome),
    onRunErrorEvent: ({ event }) => void (seen.error = event.message),
  };
  await agent.runAgent({ resume, tools }, watch).catch((error) => (seen.error ??= String(error)));
  done.push({ ...seen, messages: structuredClone(agent.messages), interrupts: agent.pendingInterrupts });
}
process.stdout.write(JSON.stringify({ done, warnings }));
