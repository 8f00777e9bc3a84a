// The page of `vfl watch`. What comes from files is set as text, never as HTML.
"use strict";

const MOST_LOG = 300;
const SAY_MS = 10000;
const SVG = "http://www.w3.org/2000/svg";
const BAD = new Set(["failed", "stopped", "set aside", "lost", "ended"]);
const WARN = new Set(["waiting", "starting", "none", "awaited", "away", "expected"]);
const SAID = {
  none: "no run yet", awaited: "awaited: late", away: "away: the others go on",
  lost: "lost: the others wait", expected: "not here yet", left: "done",
};
const BEST = ["loss", "accuracy", "auc", "rmse"];

const at = (id) => document.getElementById(id);
let curves = new Map();
let now = null;
let saidMs = 0, said = "", drawn = "";

function make(tag, text, kind) {
  const found = document.createElement(tag);
  if (text !== undefined && text !== null) found.textContent = text;
  if (kind) found.className = kind;
  return found;
}

function draw(tag, facts) {
  const found = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(facts)) found.setAttribute(key, value);
  return found;
}

// -- words

function size(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (bytes >= 1000 && place < units.length - 1) { bytes /= 1000; place += 1; }
  return `${place ? bytes.toPrecision(3) : Math.round(bytes)} ${units[place]}`;
}

function span(seconds) {
  if (seconds < 1) return "less than 1 s";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}


function number(value, digits = 4) {
  if (value === null) return "not a number";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return Math.abs(value) < 1e-3 ? value.toExponential(digits - 2) : value.toPrecision(digits);
}

const clock = (atS) => (atS ? new Date(atS * 1000).toLocaleTimeString() : "");

function ago(atS) {
  const seconds = Date.now() / 1000 - atS;
  return !atS ? "" : seconds < 2 ? "now" : `${span(seconds)} ago`;
}

const tone = (state) => (BAD.has(state) ? "bad" : WARN.has(state) ? "warn" : "good");
const under = (name) => SAID[name] || name;

function set(id, text) {
  const found = at(id);
  if (found.textContent !== text) found.textContent = text;
}

// -- parts of the page

function showHead(state) {
  set("run", state.run || "Waiting for a run");
  set("recipe", state.recipe ? `recipe ${state.recipe}` : "");
  set("state", under(state.state));
  at("state").className = `state ${tone(state.state)}`;
  set("why", state.why || "");
  document.title = `${under(state.state)} · ${state.run || "vfl watch"}`;
}

function showPhases(state) {
  const items = (state.phases || []).map((phase) => {
    const item = make("li");
    item.append(make("span", phase.name));
    const bar = make("progress");
    bar.max = phase.rounds || 1;
    bar.value = Math.min(phase.done, bar.max);
    bar.setAttribute("aria-label", phase.name);
    item.append(bar, make("span", phase.rounds ? `round ${phase.done} of ${phase.rounds}` : `round ${phase.done}`));
    return item;
  });
  at("phases").replaceChildren(...items);
  set("left", state.left_s === null || state.left_s === undefined ? ""
    : `About ${span(state.left_s)} left in this phase, at the pace of its last rounds.`);
}

function row(cells) {
  const found = make("tr");
  cells.forEach(([text, kind], place) => {
    const cell = make(place ? "td" : "th", text, kind);
    if (!place) cell.scope = "row";
    found.append(cell);
  });
  return found;
}

function showWho(state) {
  const rows = (state.processes || []).map((each) => {
    const rate = (name) => (each.rates[name] === undefined ? null : each.rates[name]);
    const why = each.why ? ` (${each.why})` : "";
    return row([
      [each.name], [each.role], [under(each.status) + why, `long ${tone(each.status)}`],
      [ago(each.last_s), "n"], [each.steps === null ? "" : each.steps.toLocaleString(), "n"],
      [rate("steps") === null ? "" : rate("steps").toPrecision(3), "n"],
      [size(each.sent), "n"], [size(rate("sent")), "n"],
      [size(each.received), "n"], [size(rate("received")), "n"],
    ]);
  });
  at("who").replaceChildren(...rows);
}

function showLinks(state) {
  const links = state.links || [];
  at("no-links").hidden = links.length > 0;
  at("links-table").hidden = links.length === 0;
  at("links").replaceChildren(...links.map((each) => row([
    [each.from], [each.to], [size(each.bytes), "n"], [size(each.rate), "n"],
  ])));
}

function showLog(lines) {
  if (!lines || !lines.length) return;
  const list = at("log"), box = list.parentElement;
  const low = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  for (const line of lines.slice(-MOST_LOG)) {
    const item = make("li", undefined, line.level);
    item.append(make("span", `${clock(line.at_s)} `, "when"), make("b", `${line.party} `), line.text);
    list.append(item);
  }
  while (list.childElementCount > MOST_LOG) list.firstElementChild.remove();
  if (low) box.scrollTop = box.scrollHeight;
}

// -- curves

function takeCurves(found) {
  for (const each of found || []) {
    const key = JSON.stringify([each.phase, each.metric, each.party, each.split]);
    const before = curves.get(key);
    const points = before && !each.whole ? before.points.concat(each.points) : each.points;
    curves.set(key, { ...each, points });
  }
}

function grouped(by) {
  const found = new Map();
  for (const each of curves.values()) {
    const key = JSON.stringify(by(each));
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(each);
  }
  return [...found.values()];
}

const place = (metric) => (BEST.includes(metric) ? BEST.indexOf(metric) : BEST.length);

function named(series) {
  const parties = new Set(series.map((each) => each.party));
  return (each) => (parties.size > 1 ? `${each.party} ${each.split}` : each.split);
}

function path(points, x, y) {
  let found = "", pen = "M";
  for (const [round, value] of points) {
    if (value === null) { pen = "M"; continue; }
    found += `${pen}${x(round).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return found;
}

function figure(series) {
  const wide = 360, high = 190, left = 54, right = 8, top = 8, low = 24;
  const all = series.map((each) => [...each.points, each.last]);
  const values = all.flat().map((each) => each[1]).filter((each) => each !== null);
  const rounds = all.flat().map((each) => each[0]);
  const least = Math.min(...values), most = Math.max(...values);
  const pad = (most - least) * 0.05 || Math.abs(most) * 0.05 || 1;
  const [y0, y1] = [least - pad, most + pad], [x0, x1] = [Math.min(...rounds), Math.max(...rounds)];
  const x = (round) => left + ((wide - left - right) * (round - x0)) / Math.max(1, x1 - x0);
  const y = (value) => high - low - ((high - top - low) * (value - y0)) / (y1 - y0);
  const { phase, metric } = series[0], name = named(series);
  const found = make("figure"), caption = make("figcaption");
  caption.append(make("h3", `${metric} of ${phase}`));
  const told = series.map((each) => `${name(each)} ${number(each.last[1])} at round ${each.last[0]}`);
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${metric} of ${phase} by round: ${told.join(", ")}` });
  svg.append(draw("path", { class: "axis", fill: "none", d: `M${left} ${top}V${high - low}H${wide - right}` }));
  for (const value of [least, most]) {
    const text = draw("text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" });
    text.textContent = number(value, 3);
    svg.append(text);
    if (least === most) break;
  }
  for (const [round, anchor] of [[x0, "start"], [x1, "end"]]) {
    const text = draw("text", { x: x(round), y: high - 6, "text-anchor": anchor });
    text.textContent = anchor === "end" ? `round ${round}` : round;
    svg.append(text);
  }
  const legend = make("ul", undefined, "legend");
  series.forEach((each, number_) => {
    const kind = `curve k${number_ % 8}`;
    svg.append(draw("path", { class: kind, d: path(all[number_], x, y) }));
    const item = make("li"), key = draw("svg", { viewBox: "0 0 30 8", "aria-hidden": "true" });
    key.append(draw("path", { class: kind, d: "M0 4H30" }));
    item.append(key, name(each));
    legend.append(item);
  });
  found.append(caption, svg, legend);
  return found;
}

function table(series) {
  const found = make("table"), head = make("tr"), body = make("tbody"), name = named(series);
  const metrics = [...new Set(series.map((each) => each.metric))].sort((a, b) => place(a) - place(b));
  found.append(make("caption", `${series[0].phase}: values of the last round`));
  const corner = make("th", "rows");
  corner.scope = "col";
  head.append(corner, ...metrics.map((metric) => {
    const cell = make("th", metric, "n");
    cell.scope = "col";
    return cell;
  }));
  for (const line of [...new Set(series.map(name))]) {
    const of = (metric) => series.find((each) => name(each) === line && each.metric === metric);
    body.append(row([[line], ...metrics.map((metric) => [of(metric) ? number(of(metric).last[1]) : "", "n"])]));
  }
  const top = make("thead");
  top.append(head);
  found.append(top, body);
  const box = make("div", undefined, "wide");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", `table: values of ${series[0].phase}`);
  box.append(found);
  return box;
}

function showCurves(changed) {
  if (!changed) return;
  at("no-curves").hidden = curves.size > 0;
  const long = (each) => new Set([...each.points, each.last].map((point) => point[0])).size > 1;
  const finite = (each) => [...each.points, each.last].some((point) => point[1] !== null);
  const panels = grouped((each) => [each.phase, each.metric])
    .map((series) => series.filter((each) => long(each) && finite(each)))
    .filter((series) => series.length)
    .sort((a, b) => place(a[0].metric) - place(b[0].metric));
  at("curves").replaceChildren(...panels.map(figure));
  at("values").replaceChildren(...grouped((each) => [each.phase]).map(table));
}

// -- the stream

function say(state) {
  const phase = (state.phases || []).filter((each) => each.done).pop();
  const text = `${under(state.state)}${phase ? `, ${phase.name} round ${phase.done}${phase.rounds ? ` of ${phase.rounds}` : ""}` : ""}`;
  const newState = now === null || now.state !== state.state;
  if (text !== said && (newState || Date.now() - saidMs > SAY_MS)) {
    said = text;
    saidMs = Date.now();
    set("said", text);
  }
}

function take(news) {
  const focused = document.activeElement;
  if (news.anew) {
    curves = new Map();
    at("log").replaceChildren();
  }
  takeCurves(news.curves);
  say(news.state);
  now = news.state;
  showHead(now);
  showPhases(now);
  showCurves(news.anew || (news.curves || []).length > 0);
  showWho(now);
  showLinks(now);
  showLog(news.log);
  if (focused && focused.isConnected) focused.focus({ preventScroll: true });
}

function connection(text) {
  at("connection").hidden = !text;
  set("connection", text);
}

const stream = new EventSource("events");
stream.onopen = () => connection("");
stream.onmessage = (event) => take(JSON.parse(event.data));
stream.addEventListener("end", () => {
  stream.close();
  connection("The watch has ended. This page shows the last state that it knew.");
});
stream.onerror = () => connection(stream.readyState === EventSource.CLOSED
  ? "The watch does not let this page in any more: open the link that it has printed last."
  : "The watch does not answer. This page shows the last state, and tries again.");
setInterval(() => { if (now) showWho(now); }, 5000);
