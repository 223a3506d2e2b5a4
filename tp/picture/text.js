// The text of a chip, put together from lines with holes: `{c}` is the chip, `{2*l+1}` runs with
// the layer, `{64/128/-}` has a number for each chip.

const {facts, parts} = JSON.parse(document.getElementById("data").textContent);
const chips = facts.asked.chips;

const whereOf = new Map();  // layer -> its part, and which copy of that it is
for (const part of parts) part.layers.forEach((layer, copy) => whereOf.set(layer, {part, copy}));
const firstPart = parts.findIndex((part) => part.layers.length > 0);
const beside = parts.filter((part) => part.layers.length === 0);
const before = beside.filter((part) => firstPart < 0 || parts.indexOf(part) < firstPart);
const after = beside.filter((part) => !before.includes(part));

function filled(text, chip, copy) {
  return text.replace(/\{([^}]*)\}/g, (_, hole) => {
    if (hole.includes("/")) return hole.split("/")[chip];
    if (hole === "c") return chip;
    const [, step, start] = hole.match(/^(?:(\d+)\*)?l(?:\+(\d+))?$/);
    return Number(step ?? 1) * copy + Number(start ?? 0);
  });
}

// What a chip runs of a part: each line's text, and the names in it without their chip.
function linesOf(part, chip, copy) {
  return part.lines
    .filter((line) => line.chips === null || line.chips.includes(chip))
    .filter((line) => !line.once || copy === 0)
    .map((line) => ({
      text: filled(line.text, chip, copy),
      names: line.names.map((name) => filled(name, chip, copy)),
    }));
}

// The whole program of a chip, as the executor would be given it.
function programOf(chip) {
  const layers = [...whereOf.keys()].sort((a, b) => a - b).map((layer) => whereOf.get(layer));
  const all = [before, layers, after].flatMap((some) =>
    some.flatMap((each) => linesOf(each.part ?? each, chip, each.copy ?? 0)));
  return ["## Main", ...all.map((line) => line.text)].map((line) => `${line}\n`).join("");
}

// --- Words and numbers

const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"};
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ENTITIES[c]);
const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function amount(size, unit = "B") {
  const power = [0, 1, 2, 3].find((p) => size < 1000 ** (p + 1)) ?? 4;
  const prefix = ["", "k", "M", "G", "T"][power];
  return `${power === 0 ? size : (size / 1000 ** power).toFixed(1)} ${prefix}${unit}`.trim();
}

// Runs of numbers: `0-3, 5`; of many runs the first few and how many numbers there are.
function runs(numbers) {
  const found = [];
  for (const n of numbers) {
    const last = found.at(-1);
    if (last !== undefined && n === last[1] + 1) last[1] = n;
    else found.push([n, n]);
  }
  const texts = found.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  const some = texts.length > 4 ? [...texts.slice(0, 3), `… (${numbers.length})`] : texts;
  return some.join(", ");
}
