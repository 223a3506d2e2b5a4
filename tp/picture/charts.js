// The balance of the chips as bars, and a step as a timeline between the places where they meet.

// --- Balance

const HELD = [["weight_bytes", "own", "weights"], ["cache_bytes", "cache", "caches"],
  ["state_bytes", "rest", "states"], ["table_bytes", "rest", "tables"]];
const CHARTS = [
  {title: "Held", total: "bytes", unit: "B", parts: HELD},
  {title: "Read for a token", total: "reads", unit: "B", parts: [["reads", "own", "read"]]},
  {title: "Operations for a token", total: "operations", unit: "",
    parts: [["operations", "own", "operations"]]},
];

function chart({title, total, unit, parts: layers}) {
  const given = facts.chips[0][`given_${total}`], whole = Math.max(given, 1);
  const bars = facts.chips.map((chip) => {
    const own = layers.map(([key, look]) =>
      `<i class="${look}" style="height:${100 * chip[key] / whole}%"></i>`).join("");
    const rest = 100 * (given - chip[total]) / whole;
    return `<div class="bar of c${chip.chip}" data-chip="${chip.chip}" data-chart="${total}">${own}` +
      `<i class="pad" style="height:${rest}%"></i></div>`;
  });
  const every = chips <= 16 ? 1 : 8;
  const under = facts.chips.map(({chip}) => `<span>${chip % every === 0 ? chip : ""}</span>`);
  return `<div class="chart"><h3>${title}</h3><p>${said(title, total, unit)}</p>` +
    `<div class="bars">${bars.join("")}</div><div class="under">${under.join("")}</div></div>`;
}

function said(title, total, unit) {
  const own = facts.chips.map((chip) => chip[total]), given = facts.chips[0][`given_${total}`];
  const [least, most] = [Math.min(...own), Math.max(...own)].map((n) => amount(n, unit));
  const range = least === most ? most : `${least} to ${most}`;
  const names = total === "bytes" ? `: ${HELD.filter(([key]) => facts.chips[0][`given_${key}`] > 0)
    .map(([, , name]) => name).join(", ")} from below` : "";
  return `${amount(given, unit)} for each chip, ${range} of it its own${names}`;
}

function describedBar(chip, total) {
  const here = facts.chips[chip], {unit, parts: layers} = CHARTS.find((c) => c.total === total);
  const noun = unit === "B" ? "bytes" : "operations";
  const rows = layers.filter(([key]) => here[`given_${key}`] > 0).map(([key, , name]) =>
    [name, `${count(here[key])} of ${count(here[`given_${key}`])} ${noun} given`]);
  if (total === "bytes") rows.push(["in all", `${count(here.bytes)} of ${count(here.given_bytes)}`]);
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
  const rows = facts.chips.map((chip) => [`<i class="of c${chip.chip}"></i>${chip.chip}`,
    ...shown.map(([key]) => count(chip[key]))]);
  return table(["chip", ...shown.map(([, name]) => name)], rows);
}

function table(heading, rows) {
  const cells = (tag, row) => `<tr>${row.map((cell) => `<${tag}>${cell}</${tag}>`).join("")}</tr>`;
  return `<table><thead>${cells("th", heading)}</thead>` +
    `<tbody>${rows.map((row) => cells("td", row)).join("")}</tbody></table>`;
}

// --- The step

// Segments in a row that belong to the same layers.
function spansOfSegments() {
  const found = [];
  facts.segments.forEach((segment, at) => {
    const last = found.at(-1);
    if (last !== undefined && last.kind === segment.layer_kind) last.segments.push(at);
    else found.push({kind: segment.layer_kind, segments: [at]});
  });
  return found;
}

function timeline(measure) {
  const share = (at) => facts.segments[at].count * facts.segments[at][`given_${measure}`];
  const all = Math.max(facts.segments.reduce((sum, _, at) => sum + share(at), 0), 1);
  const every = chips <= 16 ? 1 : 8;
  const rows = facts.chips.map(({chip}) => `<span>${chip % every === 0 ? chip : ""}</span>`).join("");
  const spans = spansOfSegments().map(({kind, segments}) => {
    const wide = segments.reduce((sum, at) => sum + share(at), 0) / all;
    const columns = segments.map((at) => column(at, measure, share(at) / all)).join("");
    return `<div class="span" style="flex:${1000 * wide} 1 0"><h4>${titleOf(kind)}</h4>` +
      `<div class="columns">${columns}</div></div>`;
  });
  return `<div id="rows">${rows}</div>${spans.join("")}`;
}

function titleOf(kind) {
  if (kind === null) return "";
  const {layers} = facts.kinds[kind];
  return layers.length === 1 ? `layer ${layers[0]}` : `${layers.length} times: layers ${runs(layers)}`;
}

function column(at, measure, wide) {
  const segment = facts.segments[at], given = segment[`given_${measure}`];
  const {kind, name} = facts.collectives[at];
  const tracks = segment[measure].map((cost, chip) => {
    const [own, rest] = given > 0 ? [100 * cost / given, 100 * (given - cost) / given] : [0, 0];
    return `<span class="track of c${chip}" data-chip="${chip}"><i class="own" style="width:${own}%"></i>` +
      `<i class="pad" style="width:${rest}%"></i></span>`;
  });
  const heading = wide > 0.06 ? `${kind} ${escaped(name)}` : "";
  return `<div class="column" data-segment="${at}" style="flex:${1000 * wide} 1 0">` +
    `<h5>${heading}</h5>${tracks.join("")}</div>`;
}

function describedSegment(at, chip) {
  const segment = facts.segments[at], {kind, name, count: times, bytes, sent} = facts.collectives[at];
  const often = times > 1 ? `, ${count(times)} times a step` : "";
  const rows = chip === null ? [] : [
    ["reads", `${count(segment.reads[chip])} of ${count(segment.given_reads)} bytes given`],
    ["computes", `${count(segment.operations[chip])} of ${count(segment.given_operations)} operations given`],
  ];
  rows.push([`then the ${kind}`, `${name}${often}`],
    ["each brings", `${count(bytes)} bytes, and sends ${count(sent)} at least`]);
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
