// Keeps a list as it is in the store. Every page works without this file.
"use strict";

const live = document.getElementById("live");
let source = null;

async function refresh() {
  const response = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!response.ok) return location.reload(); // the session has ended, for instance
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = page.getElementById("live");
  const checked = new Set([...live.querySelectorAll("input:checked")].map((one) => one.value));
  const typed = live.querySelector("input[name=reason]")?.value;
  const focused = document.activeElement?.id;
  for (const box of fresh.querySelectorAll("input[type=checkbox]")) box.checked = checked.has(box.value);
  live.replaceChildren(...fresh.childNodes);
  live.dataset.mark = fresh.dataset.mark;
  document.title = page.title;
  const reason = live.querySelector("input[name=reason]");
  if (reason && typed) reason.value = typed;
  if (focused) document.getElementById(focused)?.focus();
}

// A hidden page holds no connection: browsers open only six to one server.
function follow() {
  source?.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource(live.dataset.events);
  source.addEventListener(live.dataset.live, (event) => {
    if (JSON.parse(event.data).mark !== live.dataset.mark) refresh();
  });
}

if (live) {
  follow();
  document.addEventListener("visibilitychange", follow);
}
