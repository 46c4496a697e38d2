// Keeps a list up to date with the store. Every page works without this file.
"use strict";

const live = document.getElementById("live");
const SPANS = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
let source = null;
let wanted = "", due = null;

async function refresh(mark) {
  const response = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!response.ok) return location.reload(); // the session has ended, for instance
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = page.getElementById("live");
  live.dataset.mark = mark;
  if (live.dataset.keep && fresh.querySelector(live.dataset.keep)) return; // keep what a person is typing
  const checked = new Set([...live.querySelectorAll("input:checked")].map((one) => one.value));
  const typed = live.querySelector("input[name=reason]")?.value;
  const focused = document.activeElement?.id;
  for (const box of fresh.querySelectorAll("input[type=checkbox]")) box.checked = checked.has(box.value);
  live.replaceChildren(...fresh.childNodes);
  document.title = page.title;
  const count = document.getElementById("count");
  if (count) count.textContent = page.getElementById("count").textContent;
  const reason = live.querySelector("input[name=reason]");
  if (reason && typed) reason.value = typed;
  if (focused) document.getElementById(focused)?.focus();
}

// A hidden page closes its connection: browsers open at most six to one server.
function follow() {
  source?.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource(live.dataset.events);
  source.addEventListener(live.dataset.live, (event) => {
    const { mark, spread } = JSON.parse(event.data);
    wanted = mark;
    if (due || mark === live.dataset.mark) return;
    due = setTimeout(() => { due = null; refresh(wanted); }, Math.random() * spread * 1000); // not all viewers at once
  });
}

// Updates relative times such as "in 2 minutes".
function age() {
  for (const one of document.querySelectorAll("time[data-ages]")) {
    const seconds = (Date.parse(one.dateTime) - Date.now()) / 1000;
    const left = Math.trunc(Math.abs(seconds));
    const [size, unit] = SPANS.find(([size]) => left >= 2 * size) ?? [1, "second"];
    const span = `${Math.trunc(left / size)} ${unit}${left === 1 ? "" : "s"}`;
    one.textContent = seconds > 0 ? `in ${span}` : `${span} ago`;
  }
}

setInterval(age, 1000);

if (live) {
  follow();
  document.addEventListener("visibilitychange", follow);
}
