// Keeps a list up to date with the store, and adds keys. Every page works without this file.
"use strict";

const live = document.getElementById("live");
const SPANS = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
let source = null;
let wanted = "", due = null;
const GONE = document.createElement("div");
GONE.innerHTML = '<div class="when"><span>no longer waits</span></div>';

// Rows stay where they are, so that nothing moves under a cursor: what is gone is marked, what is new is added behind.
function merge(rows, fresh) {
  const wanted = new Map([...fresh.children].map((row) => [row.dataset.row, row]));
  for (const row of rows.children) {
    const same = wanted.get(row.dataset.row);
    wanted.delete(row.dataset.row);
    row.classList.toggle("gone", !same);
    const box = row.querySelector(".pick");
    const when = row.querySelector(".when > span");
    if (when) {
      box.disabled = !same || same.querySelector(".pick").disabled;
      box.checked &&= !box.disabled;
      when.replaceChildren(...(same ?? GONE).querySelector(".when > span").cloneNode(true).childNodes);
    } else if (same) {
      same.querySelector(".pick").checked = box.checked;
      row.replaceChildren(...same.childNodes);
    }
  }
  const news = document.getElementById("news");
  if (!news) return rows.append(...wanted.values());
  news.hidden = !wanted.size;
  news.textContent = `${wanted.size} new: show`;
}

async function refresh(mark) {
  const response = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!response.ok) return location.reload(); // the session has ended, for instance
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = page.getElementById("live");
  live.dataset.mark = mark;
  document.title = page.title;
  const count = document.getElementById("count");
  if (count) count.textContent = page.getElementById("count").textContent;
  const rows = live.querySelector("[data-rows]");
  const freshRows = fresh.querySelector("[data-rows]") ?? (rows && document.createElement("ul"));
  if (rows) {
    merge(rows, freshRows);
    for (const part of live.querySelectorAll("[data-part]")) {
      const same = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
      if (same) part.replaceChildren(...same.childNodes);
    }
  }
  else if (!live.dataset.keep || !fresh.querySelector(live.dataset.keep)) { // keep what a person is typing
    const open = [...live.querySelectorAll("details")].map((one) => one.open);
    live.replaceChildren(...fresh.childNodes);
    live.querySelectorAll("details").forEach((one, place) => { one.open ||= open[place] ?? false; });
  }
  counted();
}

// Says how many calls are selected.
function counted() {
  const boxes = [...document.querySelectorAll(".pick:enabled")];
  const chosen = boxes.filter((box) => box.checked);
  const number = chosen.reduce((sum, box) => sum + Number(box.dataset.number ?? 1), 0);
  const selected = document.getElementById("selected");
  const runs = document.querySelector(".number-selected");
  if (runs) runs.textContent = `${number} selected`;
  if (!selected) return;
  selected.textContent = `, ${number}`;
  for (const button of document.querySelectorAll(".bulk button")) button.disabled = !number;
  const all = document.getElementById("all");
  all.checked = number > 0 && chosen.length === boxes.length;
}

function selectAll() {
  const all = document.getElementById("all");
  if (!all) return;
  const link = document.getElementById("select-all");
  all.hidden = false;
  link.replaceWith(...link.childNodes); // the text becomes the label of the box
  all.addEventListener("change", () => {
    for (const box of document.querySelectorAll(".pick:enabled")) box.checked = all.checked;
    counted();
  });
}

// Keys act on what is there: [data-key] names the element. A key that was pressed before the page was seen does nothing.
const SETTLED = 300;
setTimeout(() => { document.documentElement.dataset.keys = "on"; }, SETTLED);

function move(step) {
  const links = [...document.querySelectorAll(".waiting > li:not(.gone) a.fn")];
  if (!links.length) return false;
  const place = links.indexOf(document.activeElement?.closest("li")?.querySelector("a.fn"));
  const link = links[Math.min(Math.max(place + step, 0), links.length - 1)];
  link.focus();
  link.closest("li").scrollIntoView({ block: "nearest" });
  return true;
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1) || (document.querySelector("[data-key]") && (history.back(), true)),
  x: () => document.activeElement?.closest("li")?.querySelector(".pick:enabled")?.click(),
  "/": () => {
    const search = document.querySelector(".search");
    if (search) search.open = true;
    document.querySelector(".filters input:not([type=hidden])")?.focus();
  },
  "?": () => document.getElementById("keys")?.showModal(),
};

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
  const inText = event.target.matches("input:not([type=checkbox], [type=radio]), select, textarea");
  if (event.key === "Escape" && inText) return event.target.blur();
  if (inText || !document.documentElement.dataset.keys) return;
  if (KEYS[event.key]?.()) return event.preventDefault();
  if (!/^[a-z]$/.test(event.key)) {
    if (event.key in KEYS) event.preventDefault();
    return;
  }
  const named = document.querySelector(`[data-key="${event.key}"]:enabled, a[data-key="${event.key}"], summary[data-key="${event.key}"]`);
  if (!named) return;
  event.preventDefault();
  if (named.matches("a")) named.click();
  else if (named.matches("summary")) {
    named.parentElement.open = true;
    named.parentElement.querySelector("input:not([type=hidden]), select, textarea")?.focus();
  } else named.focus();
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
document.addEventListener("keydown", press);
document.addEventListener("change", counted);
selectAll();
counted();

if (live) {
  follow();
  document.addEventListener("visibilitychange", follow);
}
