// Matrices as rectangles: every chip's slices in its colour, and beside them what it is given.

const byKey = new Map();  // `Wq7` -> its matrix and layer
for (const matrix of facts.matrices) {
  const layers = matrix.kind === null ? [null] : facts.kinds[matrix.kind].layers;
  for (const layer of layers) byKey.set(keyOf(matrix, layer), {matrix, layer});
}

function keyOf(matrix, layer) {
  return matrix.kind === null ? matrix.name : `${matrix.name}${layer}`;
}

const along = (matrix) => (matrix.axis === "rows" ? 0 : 1);
const axisOf = (matrix) => (matrix.axis === "rows" ? "rows" : "columns");
const extent = (matrix) => matrix.whole[along(matrix)] / matrix.blocks;
const holders = (matrix) =>
  matrix.ranges.flatMap((ranges, chip) => (ranges.length > 0 ? [chip] : []));

// The stretches of the axis between any two cuts, each with the chips that hold it.
function stretches(matrix) {
  const cuts = matrix.ranges.flat().flatMap(([start, length]) => [start, start + length]);
  const edges = [...new Set(cuts)].sort((a, b) => a - b);
  const holding = (at) => matrix.ranges.flatMap((ranges, chip) =>
    (ranges.some(([start, length]) => start <= at && at < start + length) ? [chip] : []));
  return edges.slice(0, -1)
    .map((start, i) => ({start, length: edges[i + 1] - start, chips: holding(start)}))
    .filter((stretch) => stretch.chips.length > 0);
}

// --- Sizes

const lengths = facts.matrices.flatMap((m) => m.whole).filter((n) => n > 1);
const shortest = Math.log(Math.min(...lengths)), longest = Math.log(Math.max(...lengths));

function side(n) {
  if (n <= 1) return 12;
  return Math.round(52 + 118 * (Math.log(n) - shortest) / Math.max(longest - shortest, 1e-9));
}

function sizeOf(matrix) {
  const size = matrix.whole.map(side);
  if (matrix.axis !== null) {
    const at = along(matrix), many = Math.max(holders(matrix).length * 16, chips * 3);
    size[at] = Math.max(size[at], Math.min(many, 250));
  }
  return size;  // height, width
}

// --- Drawing

const rect = (kind, [y, x], [height, width], rest = "") =>
  `<rect class="${kind}" x="${x}" y="${y}" width="${width}" height="${height}"${rest}/>`;

const piece = (look, place, size, chip) =>
  rect(`${look} of c${chip}`, place, size, ` data-chip="${chip}"`);

function drawn(matrix) {
  const [height, width] = sizeOf(matrix);
  if (matrix.axis === null) {
    return svg(height, width, rect("everywhere", [0, 0], [height, width]) + frame(height, width));
  }
  const at = along(matrix), scale = [height, width][at] / extent(matrix);
  const across = [width, height][at];
  // A box from its place along the cut axis and across it.
  const box = (start, length, aside, depth) =>
    (at === 0 ? [[start, aside], [length, depth]] : [[aside, start], [depth, length]]);
  const slices = stretches(matrix).flatMap(({start, length, chips: those}) =>
    those.map((chip, i) => {
      const depth = across / those.length;
      const [place, size] = box(start * scale, length * scale, i * depth, depth);
      return piece("slice", place, size, chip) + label(place, size, chip);
    }));
  const cell = [height, width][at] / chips, given = matrix.given[at];
  const strip = matrix.held.flatMap((held, chip) => {
    const own = given > 0 ? cell * held[at] / given : 0;
    const whole = box(chip * cell, cell, across + 5, 9);
    const part = box(chip * cell, own, across + 5, 9);
    const rest = box(chip * cell + own, cell - own, across + 5, 9);
    return [
      own > 0 ? piece("slice", ...part, chip) : "",
      own < cell ? piece("gap", ...rest, chip) : "",
      chips <= 16 ? rect("cell", ...whole) : "",
    ];
  });
  const [, [tall, wide]] = box(0, 0, 0, 14);
  return svg(height + (at === 1 ? tall : 0), width + (at === 0 ? wide : 0),
    slices.join("") + frame(height, width) + strip.join(""));
}

const frame = (height, width) => rect("frame", [0, 0], [height, width]);
const svg = (height, width, inside) =>
  `<svg width="${width}" height="${height}" class="${chips <= 16 ? "few" : ""}">${inside}</svg>`;

function label([y, x], [height, width], chip) {
  if (height < 11 || width < 8 + 6 * String(chip).length) return "";
  return `<text class="of c${chip}" x="${x + width / 2}" y="${y + height / 2}">${chip}</text>`;
}

function tile(matrix, layer) {
  const key = keyOf(matrix, layer);
  const blocks = matrix.blocks > 1 ? ` · ${count(matrix.blocks)} blocks` : "";
  const caption = `${shape(matrix.whole)} ${matrix.dtype}${blocks}`;
  return `<div class="tile" tabindex="0" data-key="${escaped(key)}"><b>${escaped(key)}</b>` +
    `<small>${caption}</small>${drawn(matrix)}</div>`;
}

// --- In words

const shape = ([rows, cols]) => `${count(rows)} × ${count(cols)}`;

// What is said of a matrix on one chip, or of all of it: a title and rows of label and text.
function described({matrix, layer}, chip) {
  const key = keyOf(matrix, layer);
  const kept = [["kept as", `${matrix.role} in ${matrix.dtype}`]];
  if (matrix.count > 1) kept.push(["alike in", plural(matrix.count, "layer")]);
  if (matrix.shared !== null) kept.push(["shared", `the bytes are those of ${matrix.shared}`]);
  if (matrix.axis === null) return {title: key, rows: [...ofEvery(matrix), ...kept]};
  if (chip === null) return {title: key, rows: [...ofAll(matrix), ...kept]};
  return {title: `${key}_c${chip}`, chip, rows: [...ofOne(matrix, chip), ...kept]};
}

function ofEvery(matrix) {
  return [["whole", shape(matrix.whole)], ["on", "every chip, all of it"],
    ["bytes", `${count(matrix.given_bytes)} on each`]];
}

function ofAll(matrix) {
  const {length} = holders(matrix);
  return [["whole", shape(matrix.whole)], ["cut by", axisOf(matrix)],
    ["on", length === chips ? "every chip, a part" : `${length} of ${chips} chips, a part`],
    ["given", `${shape(matrix.given)} each`],
    ["bytes", `${count(matrix.whole_bytes)} whole, ${count(matrix.given_bytes)} given to each`]];
}

function ofOne(matrix, chip) {
  const at = along(matrix), own = matrix.held[chip], padding = matrix.given[at] - own[at];
  return [["whole", shape(matrix.whole)],
    ["holds", own[at] === 0 ? "none of it" : `${axisOf(matrix)} ${spans(matrix, chip)}`],
    ...besideOf(matrix, chip),
    ["own part", shape(own)],
    ["given", shape(matrix.given)],
    ["padding", padding === 0 ? "none" : `${count(padding)} ${axisOf(matrix)}`],
    ["bytes", `${count(matrix.held_bytes[chip])} held of ${count(matrix.given_bytes)} given`]];
}

// The runs that a chip holds, of many the first few.
function spans(matrix, chip) {
  const texts = matrix.ranges[chip].map(([start, length]) =>
    `${count(start)}–${count(start + length - 1)}`);
  const some = texts.length > 4 ? [...texts.slice(0, 3), `… (${texts.length} runs)`] : texts;
  const of = `${some.join(", ")} of ${count(extent(matrix))}`;
  return matrix.blocks > 1 ? `${of}, in each of ${count(matrix.blocks)} blocks` : of;
}

// The other chips that hold what a chip holds.
function besideOf(matrix, chip) {
  const [first] = matrix.ranges[chip];
  if (first === undefined) return [];
  const {chips: those} = stretches(matrix).find(({start}) => start === first[0]);
  const others = those.filter((other) => other !== chip);
  if (others.length === 0) return [];
  return [["also on", `chip${others.length > 1 ? "s" : ""} ${runs(others)}`]];
}
