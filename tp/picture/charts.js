// The balance of the chips as bars, and a step as a timeline between the places where they meet.

// --- Balance

const HELD = [["weight_bytes", "own", "weights"], ["cache_bytes", "cache", "caches"],
  ["state_bytes", "rest", "states"], ["table_bytes", "rest", "tables"]];
const CHARTS = [
  {title: "Held", total: "bytes", unit: "B", stack: HELD},
  {title: "Read for a token", total: "reads", unit: "B", stack: [["reads", "own", "read"]]},
  {title: "Operations for a token", total: "operations", unit: "",
    stack: [["operations", "own", "operations"]]},
];

const givenOf = (key) => facts.chips[0][`given_${key}`];  // the same for every chip
const every = chips <= 16 ? 1 : 8;
const numbered = facts.chips.map(({chip}) =>
  `<span>${chip % every === 0 ? chip : ""}</span>`).join("");

function chart({title, total, unit, stack}) {
  const whole = Math.max(givenOf(total), 1);
  const part = (look, size) => `<i class="${look}" style="height:${100 * size / whole}%"></i>`;
  const bars = facts.chips.map((chip) => {
    const own = stack.map(([key, look]) => part(look, chip[key])).join("");
    return `<div class="bar of c${chip.chip}" data-chip="${chip.chip}" data-chart="${total}">` +
      `${own}${part("pad", givenOf(total) - chip[total])}</div>`;
  });
  return `<div class="chart"><h3>${title}</h3><p>${said(total, unit, stack)}</p>` +
    `<div class="bars">${bars.join("")}</div><div class="under">${numbered}</div></div>`;
}

function said(total, unit, stack) {
  const own = facts.chips.map((chip) => chip[total]);
  const [least, most] = [Math.min(...own), Math.max(...own)].map((n) => amount(n, unit));
  const range = least === most ? most : `${least} to ${most}`;
  const names = stack.filter(([key]) => givenOf(key) > 0).map(([, , name]) => name);
  const order = names.length > 1 ? `; from below: ${names.join(", ")}` : "";
  return `${amount(givenOf(total), unit)} for each chip, ${range} of it its own${order}`;
}

function describedBar(chip, total) {
  const here = facts.chips[chip], {unit, stack} = CHARTS.find((each) => each.total === total);
  const noun = unit === "B" ? "bytes" : "operations";
  const rows = stack.filter(([key]) => givenOf(key) > 0).map(([key, , name]) =>
    [name, `${count(here[key])} of ${count(givenOf(key))} ${noun} given`]);
  if (stack === HELD) rows.push(["in all", `${count(here.bytes)} of ${count(givenOf("bytes"))}`]);
  return {title: `chip ${chip}`, chip, rows};
}

const COLUMNS = [["query_heads", "query heads"], ["kv_heads", "kv heads"],
  ["value_heads", "value heads"], ["key_heads", "key heads"], ["ffn_columns", "ffn columns"],
  ["expert_columns", "expert columns"], ["shared_columns", "shared columns"],
  ["vocabulary", "vocabulary"], ["weight_bytes", "weights"], ["padding_bytes", "padding"],
  ["cache_bytes", "caches"], ["state_bytes", "states"], ["table_bytes", "tables"],
  ["reads", "read"], ["operations", "operations"]];

function numbersTable() {
  const shown = COLUMNS.filter(([key]) => facts.chips.some((chip) => chip[key] > 0));
  const rows = facts.chips.map((chip) => [`<i class="dot c${chip.chip}"></i>${chip.chip}`,
    ...shown.map(([key]) => count(chip[key]))]);
  return table(["chip", ...shown.map(([, name]) => name)], rows);
}

function table(heading, rows) {
  const cells = (tag, row) =>
    `<tr>${row.map((cell) => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  return `<table><thead>${cells("th", heading)}</thead>` +
    `<tbody>${rows.map((row) => cells("td", row)).join("")}</tbody></table>`;
}

// --- The step

// Segments in a row that belong to the same layers.
function spansOfSegments() {
  const found = [];
  facts.segments.forEach(({layer_kind: kind}, at) => {
    const last = found.at(-1);
    if (last !== undefined && last.kind === kind) last.segments.push(at);
    else found.push({kind, segments: [at]});
  });
  return found;
}

function timeline(measure) {
  const shares = facts.segments.map((segment) => segment.count * segment[`given_${measure}`]);
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const whole = Math.max(sum(shares), 1);
  const spans = spansOfSegments().map(({kind, segments}) => {
    const wide = sum(segments.map((at) => shares[at])) / whole;
    const columns = segments.map((at) => column(at, measure, shares[at] / whole)).join("");
    return `<div class="span" style="flex:${1000 * wide} 1 0"><h4>${titleOf(kind)}</h4>` +
      `<div class="columns">${columns}</div></div>`;
  });
  return `<div id="rows">${numbered}</div>${spans.join("")}`;
}

function titleOf(kind) {
  if (kind === null) return "";
  const {layers} = facts.kinds[kind], numbers = runs(layers);
  return layers.length === 1 ? `layer ${numbers}` : `${layers.length} times: layers ${numbers}`;
}

function column(at, measure, wide) {
  const segment = facts.segments[at], given = segment[`given_${measure}`];
  const {kind, name} = facts.collectives[at];
  const part = (look, size) =>
    `<i class="${look}" style="width:${given > 0 ? 100 * size / given : 0}%"></i>`;
  const tracks = segment[measure].map((cost, chip) =>
    `<span class="track of c${chip}" data-chip="${chip}">` +
    `${part("own", cost)}${part("pad", given - cost)}</span>`);
  const heading = wide > 0.06 ? `${kind} ${escaped(name)}` : "";
  return `<div class="column" data-segment="${at}" style="flex:${1000 * wide} 1 0">` +
    `<h5>${heading}</h5>${tracks.join("")}</div>`;
}

function describedSegment(at, chip) {
  const segment = facts.segments[at], {kind, name, ...meeting} = facts.collectives[at];
  const of = (measure) =>
    `${count(segment[measure][chip])} of ${count(segment[`given_${measure}`])}`;
  const own = chip === null ? [] : [["reads", `${of("reads")} bytes given`],
    ["computes", `${of("operations")} operations given`]];
  const often = meeting.count > 1 ? `, ${count(meeting.count)} times a step` : "";
  const rows = [...own, [`then the ${kind}`, `${name}${often}`],
    ["each brings", `${count(meeting.bytes)} bytes, and sends ${count(meeting.sent)} at least`]];
  return {title: chip === null ? `up to the ${kind} of ${name}` : `chip ${chip}`, chip, rows};
}

function meetingsTable() {
  const rows = facts.segments.map((segment, at) => {
    const {kind, name, layer_kind: layers, count: times, bytes, sent} = facts.collectives[at];
    return [`${kind} ${escaped(name)}`, layers === null ? "" : runs(facts.kinds[layers].layers),
      count(times), ...["reads", "operations"].flatMap((measure) =>
        [count(Math.max(...segment[measure])), count(segment[`given_${measure}`])]),
      count(bytes), count(sent)];
  });
  return table(["meeting", "layers", "times", "own reads at most", "reads given",
    "own operations at most", "operations given", "brought", "sent"], rows);
}
