// The page: what is pointed at, what lights up with it, and what is chosen.

// --- Colours

// Hue and lightness of few chips; many go round the circle, light and dark in turn.
const HUES = [[250, 0], [60, 0.07], [150, 0.02], [345, 0.03], [100, 0.12], [300, -0.04],
  [200, 0.08], [25, -0.06]];
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

// --- What is pointed at

const namesOf = (line) => line.dataset.names.split(" ");

function unmark(look) {
  all(`.${look}`).forEach((element) => element.classList.remove(look));
}

function mark(elements, look) {
  unmark(look);
  elements.forEach((element) => element.classList.add(look));
}

const linesWith = (key) => all(".line").filter((line) => namesOf(line).includes(key));
const tilesOf = (line) =>
  all(".tile").filter((each) => namesOf(line).includes(each.dataset.key));

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
function meaning(target) {
  const of = target.closest("[data-chip]")?.dataset.chip;
  const chip = of === undefined ? null : Number(of);
  const element = target.closest("[data-key], [data-segment], [data-chart], .line");
  if (element === null) return {element: target.closest("#chips button"), chip};
  const {key, segment, chart: total} = element.dataset;
  if (key !== undefined) return {element, chip, key, tip: described(byKey.get(key), chip)};
  if (segment !== undefined) return {element, chip, tip: describedSegment(Number(segment), chip)};
  if (total !== undefined) return {element, chip, tip: describedBar(chip, total)};
  return {element, chip: null, line: element};
}

function point(target, at) {
  const {element, chip, tip, key, line} = meaning(target);
  alone(element === null ? null : chip);
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
  const dot = tip.chip === null || tip.chip === undefined ? "" : `<i class="dot c${tip.chip}"></i>`;
  const rows = tip.rows.map(([label, text]) =>
    `<dt>${escaped(label)}</dt><dd>${escaped(text)}</dd>`);
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

// Keeps a matrix's statements lit, and shows the text of the chip whose slice it was.
function pick(tile, slice) {
  if (slice !== null) choose(Number(slice.dataset.chip));
  const lines = linesWith(tile.dataset.key);
  mark([tile, ...lines], "used");
  state.pinned = true;
  reveal(get("lines"), lines);
}

function letGo() {
  unmark("used");
  state.pinned = false;
}

function choose(chip) {
  state.chip = chip;
  get("chip").value = chip;
  press("#chips button", "chip", String(chip));
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
  all(selector).forEach((button) =>
    button.setAttribute("aria-pressed", button.dataset[field] === value));
}

function measured(measure) {
  get("timeline").innerHTML = timeline(measure);
  press("#measure button", "measure", measure);
}

document.addEventListener("click", ({target}) => {
  const button = target.closest("button");
  const {fold, measure, theme: name, chip} = button?.dataset ?? {};
  const line = target.closest(".line"), tile = target.closest(".tile");
  const segment = target.closest("[data-segment]");
  if (line !== null) use(line);
  else if (fold !== undefined) toggle(Number(fold));
  else if (measure !== undefined) measured(measure);
  else if (name !== undefined) theme(name);
  else if (chip !== undefined) choose(Number(chip));
  else if (tile !== null) pick(tile, target.closest("[data-chip]"));
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
document.addEventListener("keydown", ({key, target}) => {
  if (key === "Escape") letGo();
  if (key === "Enter" && target.matches(".tile")) pick(target, null);
});
document.addEventListener("pointerover", ({target, clientX: x, clientY: y}) =>
  point(target, {x, y}));
document.addEventListener("pointermove", ({clientX: x, clientY: y}) => moveTip({x, y}));
document.documentElement.addEventListener("pointerleave", () =>
  point(document.body, {x: 0, y: 0}));
document.addEventListener("focusin", ({target}) => {
  const {right: x, top: y} = target.getBoundingClientRect();
  if (target.matches(".tile:focus-visible, .line:focus-visible")) point(target, {x, y});
});

// --- The page

function lede() {
  const {model, totals, asked} = facts;
  const [{given_bytes: each, given_weight_bytes: weights}] = facts.chips;
  const meetings = [plural(totals.folds, "fold"),
    ...(totals.joins > 0 ? [plural(totals.joins, "join")] : [])];
  return `${plural(model.layers, "layer")} of width ${count(model.width)}, ` +
    `a vocabulary of ${count(model.vocabulary)}, a context of ${count(asked.context)} tokens, ` +
    `on ${plural(chips, "chip")}: ${amount(each)} on each, ${amount(weights)} of it weights; ` +
    `${meetings.join(" and ")} a token; ` +
    `at best ${totals.speed_up.toFixed(1)} times as fast as one chip.`;
}

// The first chip, unless it lacks what others have: then the first that reads most.
function firstChip() {
  const lacks = facts.matrices.some((m) => m.axis !== null && m.ranges[0].length === 0);
  const reads = facts.chips.map((chip) => chip.reads);
  return lacks ? reads.indexOf(Math.max(...reads)) : 0;
}

document.body.classList.toggle("many", chips > 16);
const row = Math.max(6, Math.min(22, Math.floor(420 / chips)));
document.body.style.setProperty("--row", `${row}px`);
colours();
get("lede").textContent = lede();
get("most").textContent =
  `The one that reads most reads ${facts.totals.balance.toFixed(2)} times the mean.`;
get("chips").innerHTML = facts.chips.map(({chip}) =>
  `<button class="of c${chip}" data-chip="${chip}"><i></i>${chip}</button>`).join("");
get("chip").innerHTML = facts.chips.map(({chip}) => `<option>${chip}</option>`).join("");
get("charts").innerHTML = CHARTS.map(chart).join("");
get("numbers").innerHTML = numbersTable();
get("meetings").innerHTML = meetingsTable();
drawMatrices();
choose(firstChip());
measured("reads");
let kept = "auto";
try {
  kept = localStorage.getItem("anyfold-theme") ?? "auto";
} catch { /* a page from a file may keep nothing */ }
theme(kept);
