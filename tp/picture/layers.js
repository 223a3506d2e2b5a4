// Layers that are alike, once or each by itself: their matrices, and their part of the text.

// What is shown: whose text, which of like layers, which kinds of layers each by itself.
const state = {chip: 0, layer: new Map(), open: new Set(), pinned: false};
const get = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];

const layerOf = (kind) => state.layer.get(kind) ?? facts.kinds[kind].layers[0];

const ofKind = (kind) => facts.matrices.filter((m) => m.kind === kind);

function groups() {
  const first = facts.matrices.findIndex((m) => m.kind !== null);
  const loose = facts.matrices.map((m, at) => [m, at]).filter(([m]) => m.kind === null);
  const early = loose.filter(([m, at]) => at < first || first < 0 || m.role === "table");
  const late = loose.filter((each) => !early.includes(each));
  const layered = facts.kinds.map((_, kind) => ({kind, matrices: ofKind(kind)}));
  const outside = (title, some) => ({title, kind: null, matrices: some.map(([m]) => m)});
  return [outside("Before the layers", early), ...layered, outside("After the layers", late)]
    .filter((group) => group.matrices.length > 0);
}

const tiles = (matrices, layer) =>
  `<div class="tiles">${matrices.map((m) => tile(m, layer)).join("")}</div>`;

function drawnGroup({title, kind, matrices}) {
  if (kind === null) return group(title, tiles(matrices, null));
  const {layers, mixer, feed_forward: feed} = facts.kinds[kind];
  const what = `<small>${escaped(mixer)}, ${escaped(feed)}</small>`;
  if (layers.length === 1) return group(`Layer ${layers[0]} ${what}`, tiles(matrices, layers[0]));
  const open = state.open.has(kind);
  const fold = `<button data-fold="${kind}" aria-expanded="${open}">` +
    `${open ? "Fold" : "Each by itself"}</button>`;
  const heading = `Layers ${runs(layers)} <small>${layers.length} alike</small> ${what}`;
  return open ? group(`${heading} ${fold}`, eachLayer(kind))
    : group(`${heading} ${picker(kind)} ${fold}`, tiles(matrices, layerOf(kind)));
}

const group = (heading, inside) => `<div class="group"><h3>${heading}</h3>${inside}</div>`;

function picker(kind) {
  const options = facts.kinds[kind].layers.map((layer) =>
    `<option${layer === layerOf(kind) ? " selected" : ""}>${layer}</option>`);
  return `<label><small>shown: layer</small> ` +
    `<select data-pick="${kind}">${options.join("")}</select></label>`;
}

// Layers by themselves are drawn when they are opened: there may be a hundred.
function eachLayer(kind) {
  const each = facts.kinds[kind].layers.map((layer) => {
    const open = layer === layerOf(kind) ? " open" : "";
    return `<details class="each" data-layer="${layer}" data-kind="${kind}"${open}>` +
      `<summary>Layer ${layer}</summary></details>`;
  });
  return each.join("");
}

function drawMatrices() {
  get("groups").innerHTML = groups().map(drawnGroup).join("");
  all("details.each[open]").forEach(fillLayer);
}

function fillLayer(details) {
  if (details.querySelector(".tiles") !== null) return;
  const {kind, layer} = details.dataset;
  details.insertAdjacentHTML("beforeend", tiles(ofKind(Number(kind)), Number(layer)));
}

// --- The text

function drawText() {
  const layers = facts.kinds.flatMap(({layers: alike}, kind) =>
    (state.open.has(kind) ? alike : [layerOf(kind)]).map((layer) => ({layer, kind})));
  layers.sort((a, b) => a.layer - b.layer);
  const outside = (title, some) =>
    some.map((part) => block(title, linesOf(part, state.chip, 0)));
  const inside = layers.map(({layer, kind}) => {
    const {part, copy} = whereOf.get(layer), {length} = facts.kinds[kind].layers;
    const alike = length > 1 && !state.open.has(kind) ? `, one of ${length} alike` : "";
    return block(`Layer ${layer}${alike}`, linesOf(part, state.chip, copy));
  });
  get("lines").innerHTML = [...outside("Before the layers", before), ...inside,
    ...outside("After the layers", after)].join("");
}

const block = (title, lines) =>
  `<div class="block"><h4>${title}</h4>${lines.map(drawnLine).join("")}</div>`;

function drawnLine({text, names}) {
  const marked = escaped(text).replace(/[A-Za-z]\w*/g, (word) =>
    (byKey.has(word.replace(/_c\d+$/, "")) ? `<b>${word}</b>` : word));
  const meet = / be the (fold|join) of /.test(text) ? " meet" : "";
  return `<button class="line${meet}" data-names="${escaped(names.join(" "))}">${marked}</button>`;
}
