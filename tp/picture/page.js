// The page: what is shown, what is pointed at, and what lights up with it.

const state = {chip: 0, layer: new Map(), open: new Set(), pinned: false, measure: "reads"};
const get = (id) => document.getElementById(id);

// --- Colours

const HUES = [[250, 0], [60, 0.07], [150, 0.02], [345, 0.03], [100, 0.12], [300, -0.04], [200, 0.08], [25, -0.06]];
const LIFTS = [0, 0.09, -0.07];

function colours() {
  const of = (chip) => (chips <= HUES.length ? HUES[chip]
    : [(250 + 360 * chip / chips) % 360, LIFTS[chip % LIFTS.length]]);
  const rules = facts.chips.map(({chip}) => {
    const [hue, lift] = of(chip);
    return `.c${chip} { --hue: ${hue}; --lift: ${lift}; }`;
  });
  const style = document.createElement("style");
  style.textContent = rules.join("\n");
  document.head.append(style);
}

// Dims all chips but one.
function alone(chip) {
  document.body.classList.toggle("alone", chip !== null);
  mark(chip === null ? [] : all(`.c${chip}`), "lit");
}

// --- Layers that are alike

const layerOf = (kind) => state.layer.get(kind) ?? facts.kinds[kind].layers[0];

function groups() {
  const first = facts.matrices.findIndex((m) => m.kind !== null);
  const loose = facts.matrices.map((m, at) => [m, at]).filter(([m]) => m.kind === null);
  const early = loose.filter(([m, at]) => at < first || first < 0 || m.role === "table");
  const late = loose.filter((each) => !early.includes(each));
  const layered = facts.kinds.map((_, kind) =>
    ({kind, matrices: facts.matrices.filter((m) => m.kind === kind)}));
  const outside = (title, some) => ({title, kind: null, matrices: some.map(([m]) => m)});
  return [outside("Before the layers", early), ...layered, outside("After the layers", late)]
    .filter((group) => group.matrices.length > 0);
}

const tiles = (matrices, layer) =>
  `<div class="tiles">${matrices.map((m) => tile(m, layer)).join("")}</div>`;

function drawnGroup({title, kind, matrices}) {
  if (kind === null) return `<div class="group"><h3>${title}</h3>${tiles(matrices, null)}</div>`;
  const {layers, mixer, feed_forward: feed} = facts.kinds[kind];
  const what = `<small>${escaped(mixer)}, ${escaped(feed)}</small>`;
  if (layers.length === 1) {
    return `<div class="group"><h3>Layer ${layers[0]} ${what}</h3>${tiles(matrices, layers[0])}</div>`;
  }
  const open = state.open.has(kind), here = layerOf(kind);
  const options = layers.map((layer) =>
    `<option${layer === here ? " selected" : ""}>${layer}</option>`).join("");
  const pick = open ? "" : `<label><small>shown: layer</small> <select data-pick="${kind}">${options}</select></label>`;
  const each = layers.map((layer) =>
    `<details class="each" data-layer="${layer}" data-kind="${kind}"${layer === here ? " open" : ""}>` +
    `<summary>Layer ${layer}</summary></details>`).join("");
  return `<div class="group"><h3>Layers ${runs(layers)} <small>${layers.length} alike</small> ${what} ${pick}` +
    `<button data-fold="${kind}" aria-expanded="${open}">${open ? "Fold" : "Each by itself"}</button></h3>` +
    `${open ? each : tiles(matrices, here)}</div>`;
}

function drawMatrices() {
  get("groups").innerHTML = groups().map(drawnGroup).join("");
  document.querySelectorAll("details.each[open]").forEach(fillLayer);
}

function fillLayer(details) {
  if (details.querySelector(".tiles") !== null) return;
  const kind = Number(details.dataset.kind);
  const matrices = facts.matrices.filter((m) => m.kind === kind);
  details.insertAdjacentHTML("beforeend", tiles(matrices, Number(details.dataset.layer)));
}

// --- The text

function drawText() {
  const layers = facts.kinds.flatMap(({layers: all}, kind) =>
    (state.open.has(kind) ? all : [layerOf(kind)]).map((layer) => ({layer, kind})));
  layers.sort((a, b) => a.layer - b.layer);
  const outside = (title, some) => some.map((part) => block(title, linesOf(part, state.chip, 0)));
  const inside = layers.map(({layer, kind}) => {
    const {part, copy} = whereOf.get(layer), {layers: all} = facts.kinds[kind];
    const alike = all.length > 1 && !state.open.has(kind) ? `, one of ${all.length} alike` : "";
    return block(`Layer ${layer}${alike}`, linesOf(part, state.chip, copy));
  });
  get("lines").innerHTML = [...outside("Before the layers", before), ...inside,
    ...outside("After the layers", after)].join("");
}

function block(title, lines) {
  const drawnLine = ({text, names}) => {
    const marked = escaped(text).replace(/[A-Za-z]\w*/g, (word) =>
      (byKey.has(word.replace(/_c\d+$/, "")) ? `<b>${word}</b>` : word));
    const meet = / be the (fold|join) of /.test(text) ? " meet" : "";
    return `<button class="line${meet}" data-names="${escaped(names.join(" "))}">${marked}</button>`;
  };
  return `<div class="block"><h4>${title}</h4>${lines.map(drawnLine).join("")}</div>`;
}

// --- What is pointed at

const namesOf = (line) => line.dataset.names.split(" ");
const all = (selector) => [...document.querySelectorAll(selector)];

function unmark(look) {
  all(`.${look}`).forEach((element) => element.classList.remove(look));
}

function mark(elements, look) {
  unmark(look);
  elements.forEach((element) => element.classList.add(look));
}

const linesWith = (key) => all(".line").filter((line) => namesOf(line).includes(key));
const tilesOf = (line) => all(".tile").filter((each) => namesOf(line).includes(each.dataset.key));

// Scrolls a box of its own, never the page.
function reveal(box, elements) {
  if (elements.length === 0 || box.scrollHeight <= box.clientHeight) return;
  const outer = box.getBoundingClientRect(), top = outer.top + 30;
  const seen = elements.some((e) => {
    const inner = e.getBoundingClientRect();
    return inner.top >= top && inner.bottom <= outer.bottom;
  });
  if (!seen) box.scrollTop += elements[0].getBoundingClientRect().top - top - 10;
}

// What an element under the pointer is: what to say of it, and which chip it is of.
function meaning(element) {
  const chip = element.closest("[data-chip]")?.dataset.chip;
  const of = chip === undefined ? null : Number(chip);
  const found = element.closest("[data-key], [data-segment], [data-chart], .line");
  if (found === null) return {chip: of, element: element.closest("#chips button")};
  const {key, segment, chart: total} = found.dataset;
  if (key !== undefined) return {element: found, chip: of, tip: described(byKey.get(key), of), key};
  if (segment !== undefined) return {element: found, chip: of, tip: describedSegment(Number(segment), of)};
  if (total !== undefined) return {element: found, chip: of, tip: describedBar(of, total)};
  return {element: found, chip: null, line: found};
}

function point(target, at) {
  const {element, chip, tip, key, line} = meaning(target);
  alone(element === null || element === undefined ? null : chip);
  showTip(tip, at);
  if (key !== undefined) {
    const lines = linesWith(key);
    mark([element, ...lines], "hit");
    if (!state.pinned) reveal(get("lines"), lines);
  } else if (line !== undefined) {
    mark([line, ...tilesOf(line)], "hit");
  } else {
    unmark("hit");
  }
}

function showTip(tip, at) {
  const box = get("tip");
  box.hidden = tip === undefined;
  if (tip === undefined) return;
  const dot = tip.chip === null || tip.chip === undefined ? "" : `<i class="of c${tip.chip}"></i>`;
  const rows = tip.rows.map(([label, text]) => `<dt>${escaped(label)}</dt><dd>${escaped(text)}</dd>`);
  box.innerHTML = `<b>${dot}${escaped(tip.title)}</b><dl>${rows.join("")}</dl>`;
  moveTip(at);
}

function moveTip({x, y}) {
  const box = get("tip"), {offsetWidth: width, offsetHeight: height} = box;
  const left = Math.min(x + 14, innerWidth - width - 8);
  const top = y + 18 + height > innerHeight ? y - height - 12 : y + 18;
  box.style.transform = `translate(${Math.max(left, 8)}px, ${Math.max(top, 8)}px)`;
}

// --- What is chosen

function use(line) {
  const found = tilesOf(line);
  mark([line, ...found], "used");
  state.pinned = true;
  const [first] = found;
  if (first !== undefined) first.scrollIntoView({block: "nearest"});
}

function letGo() {
  unmark("used");
  state.pinned = false;
}

function choose(chip) {
  state.chip = chip;
  get("chip").value = chip;
  all("#chips button").forEach((button) =>
    button.setAttribute("aria-pressed", Number(button.dataset.chip) === chip));
  const {scrollTop} = get("lines");
  drawText();
  get("lines").scrollTop = scrollTop;
}

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  press("#theme button", "theme", name);
  try {
    localStorage.setItem("anyfold-theme", name);
  } catch { /* a page from a file may keep nothing */ }
}

function press(selector, field, value) {
  all(selector).forEach((button) => button.setAttribute("aria-pressed", button.dataset[field] === value));
}

function measured(measure) {
  state.measure = measure;
  get("timeline").innerHTML = timeline(measure);
  press("#measure button", "measure", measure);
}

document.addEventListener("click", ({target}) => {
  const button = target.closest("button");
  const {fold, measure, theme: name, chip} = button?.dataset ?? {};
  const line = target.closest(".line"), slice = target.closest(".tile [data-chip]");
  const segment = target.closest("[data-segment]");
  if (line !== null) use(line);
  else if (fold !== undefined) toggle(Number(fold));
  else if (measure !== undefined) measured(measure);
  else if (name !== undefined) theme(name);
  else if (chip !== undefined) choose(Number(chip));
  else if (slice !== null) choose(Number(slice.dataset.chip));
  else if (segment !== null) meet(Number(segment.dataset.segment));
  else if (target.closest("select, summary, #tip") === null) letGo();
});

function toggle(kind) {
  if (!state.open.delete(kind)) state.open.add(kind);
  letGo();
  drawMatrices();
  drawText();
}

// Shows where the text has a meeting.
function meet(at) {
  const {name, layer_kind: kind} = facts.collectives[at];
  const out = kind === null ? name : `${name}${layerOf(kind)}`;
  const lines = all(".line.meet").filter((line) => namesOf(line)[0] === out);
  mark(lines, "used");
  state.pinned = true;
  reveal(get("lines"), lines);
}

document.addEventListener("change", ({target}) => {
  if (target.id === "chip") choose(Number(target.value));
  if (target.dataset.pick !== undefined) {
    state.layer.set(Number(target.dataset.pick), Number(target.value));
    letGo();
    drawMatrices();
    drawText();
  }
});
document.addEventListener("toggle", ({target}) => {
  if (target.matches("details.each[open]")) fillLayer(target);
}, true);
document.addEventListener("keydown", ({key}) => {
  if (key === "Escape") letGo();
});
document.addEventListener("pointerover", ({target, clientX: x, clientY: y}) => point(target, {x, y}));
document.addEventListener("pointermove", ({clientX: x, clientY: y}) => moveTip({x, y}));
document.documentElement.addEventListener("pointerleave", () => point(document.body, {x: 0, y: 0}));
document.addEventListener("focusin", ({target}) => {
  const {right: x, top: y} = target.getBoundingClientRect();
  if (target.matches(".tile:focus-visible, .line:focus-visible")) point(target, {x, y});
});

// --- The page

function lede() {
  const {model, totals, asked} = facts, [{given_bytes: each, given_weight_bytes: weights}] = facts.chips;
  const meetings = `${plural(totals.folds, "fold")}${totals.joins > 0 ? ` and ${plural(totals.joins, "join")}` : ""}`;
  return `${plural(model.layers, "layer")} of width ${count(model.width)}, a vocabulary of ` +
    `${count(model.vocabulary)}, a context of ${count(asked.context)} tokens, on ${plural(chips, "chip")}: ` +
    `${amount(each)} on each, ${amount(weights)} of it weights; ${meetings} a token; at best ` +
    `${totals.speed_up.toFixed(1)} times as fast as one chip.`;
}

// The first chip, unless it lacks what others have: then the first that reads most.
function firstChip() {
  const lacks = facts.matrices.some((m) => m.axis !== null && m.ranges[0].length === 0);
  const reads = facts.chips.map((chip) => chip.reads);
  return lacks ? reads.indexOf(Math.max(...reads)) : 0;
}

document.body.classList.toggle("many", chips > 16);
document.body.style.setProperty("--row", `${Math.max(6, Math.min(22, Math.floor(420 / chips)))}px`);
colours();
get("lede").textContent = lede();
get("most").textContent = `The one that reads most reads ${facts.totals.balance.toFixed(2)} times the mean.`;
get("chips").innerHTML = facts.chips.map(({chip}) =>
  `<button class="of c${chip}" data-chip="${chip}"><i></i>${chip}</button>`).join("");
get("chip").innerHTML = facts.chips.map(({chip}) => `<option>${chip}</option>`).join("");
get("charts").innerHTML = CHARTS.map(chart).join("");
get("numbers").innerHTML = numbersTable();
get("meetings").innerHTML = meetingsTable();
drawMatrices();
choose(firstChip());
measured(state.measure);
let kept = "auto";
try {
  kept = localStorage.getItem("anyfold-theme") ?? "auto";
} catch { /* a page from a file may keep nothing */ }
theme(kept);
