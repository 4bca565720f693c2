/** Who trained what: layers by devices, and devices by rounds. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { printable } from "../federation/printable.ts";
import type { Round, Seat, Seats } from "./api.ts";
import { colour } from "./chart.tsx";
import { compact, duration, median } from "./format.ts";
import { Bar, Card, Empty, Outside, Table } from "./parts.tsx";

const MOST_COLUMNS = 24; // devices; of more than that the boundaries are columns

/** Every layer, and the devices that trained it in the newest round that is done. */
export function Layers({ seats, rounds }: { readonly seats: Seats; readonly rounds: readonly Round[] }) {
  const last = rounds.findLast((round) => round.state === "committed");
  if (last === undefined) return null;
  const done = seats.seats.filter((seat) => seat.round === last.number && seat.state === "arrived");
  const trainers = last.summary.trainers ?? {};
  const wide = done.length > MOST_COLUMNS;
  const groups = wide
    ? [...new Set(done.map((seat) => seat.boundary))].map((boundary) => ({ id: boundary, name: boundary, boundary, count: done.filter((seat) => seat.boundary === boundary).length }))
    : done.map((seat) => ({ id: String(seat.slot), name: seats.devices[seat.device] ?? seat.device, boundary: seat.boundary, count: 1 }));
  groups.sort((a, b) => (seats.boundaries[b.boundary]?.length ?? 0) - (seats.boundaries[a.boundary]?.length ?? 0));
  return (
    <Card title="Layers and their trainers" side={<span class="quiet">round {last.number}</span>} wide>
      <div class="scroll" role="region" tabIndex={0} aria-label="Layers and their trainers">
        <table class="matrix">
          <caption class="visually-hidden">Which device trained which layer in round {last.number}</caption>
          <thead>
            <tr>
              <th scope="col">Layer</th>
              <th scope="col" class="number">Parameters</th>
              <th scope="col">Trained by</th>
              {groups.map((group) => <th key={group.id} scope="col" class="turned"><span><Outside text={wide ? `${group.name} (${group.count})` : group.name} most={18} /></span></th>)}
            </tr>
          </thead>
          <tbody>
            {seats.layers.map((layer, at) => {
              const by = trainers[layer.name] ?? 0;
              const label = `${by} of ${done.length} devices`;
              return (
                <tr key={layer.name}>
                  <th scope="row"><Outside text={layer.name} most={40} /></th>
                  <td class="number">{compact(layer.parameters)}</td>
                  <td><span class="meter"><span>{label}</span><Bar share={by / Math.max(1, done.length)} label={label} tone={by === 0 ? "bad" : "good"} /></span></td>
                  {groups.map((group) => {
                    const trains = seats.boundaries[group.boundary]?.includes(at) ?? false;
                    return <td key={group.id} class={trains ? "cell on" : "cell"}><span class="visually-hidden">{trains ? "trained" : "not trained"}</span></td>;
                  })}
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

interface HeatRow {
  readonly device: string;
  readonly name: string;
  readonly cells: ReadonlyMap<number, { readonly state: string; readonly seconds: number | null; readonly boundary: string }>;
  readonly lost: number;
  readonly done: number;
  readonly usual: number | undefined;
}

const ROW = 18; // pixels
const [LABELS, LABELS_SMALL] = [170, 104];
const TOP = 18;

/** Devices by rounds: how long each took beside the others, and where it did not answer. */
export function HeatMap({ seats }: { readonly seats: Seats }) {
  const { rows, rounds, typical } = useMemo(() => gathered(seats), [seats]);
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [pointed, setPointed] = useState("");
  const labels = width < 520 ? LABELS_SMALL : LABELS;
  const cell = Math.max(6, Math.min(26, (width - labels - 4) / Math.max(1, rounds.length)));
  useEffect(() => {
    const seen = new ResizeObserver(([entry]) => setWidth(entry!.contentRect.width));
    seen.observe(box.current!);
    return () => seen.disconnect();
  }, []);
  useEffect(() => {
    if (canvas.current === null || width === 0) return;
    const draw = (): void => paint(canvas.current!, rows, rounds, typical, labels, cell);
    draw();
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    return () => dark.removeEventListener("change", draw);
  }, [rows, rounds, typical, labels, cell, width]);
  const find = (event: MouseEvent): { row: HeatRow; round: number | undefined } | undefined => {
    const row = rows[Math.floor((event.offsetY - TOP) / ROW)];
    return row && event.offsetY >= TOP ? { row, round: rounds[Math.floor((event.offsetX - labels) / cell)] } : undefined;
  };
  const point = (event: MouseEvent): void => {
    const found = find(event);
    const known = found?.round === undefined || event.offsetX < labels ? undefined : found.row.cells.get(found.round);
    setPointed(!found ? "" : !known ? printable(found.row.name, 60) : `${printable(found.row.name, 60)}, round ${found.round}: ${told(known)}`);
  };
  return (
    <Card title="Devices and rounds" side={<HeatKey />} wide>
      {rows.length === 0 ? <Empty title="No device has trained yet" /> : null}
      <div ref={box} class="scroll heat" role="region" tabIndex={0} aria-label="Devices and rounds">
        <canvas
          ref={canvas}
          role="img"
          aria-label={`${rows.length} devices over ${rounds.length} rounds; the table below has the numbers`}
          onMouseMove={point}
          onMouseLeave={() => setPointed("")}
          onClick={(event) => {
            const found = find(event);
            if (found) location.hash = `#/devices/${found.row.device}`;
          }}
        />
      </div>
      <p class="quiet pointed" aria-hidden="true">{pointed || "How long a device took is shown beside the others of the round."}</p>
      <details>
        <summary>Numbers</summary>
        <Table
          caption="Devices and what they did in these rounds"
          rows={rows}
          id={(row) => row.device}
          columns={[
            { name: "Device", cell: (row) => <a href={`#/devices/${row.device}`}><Outside text={row.name} most={60} /></a>, key: (row) => row.name },
            { name: "Updates", cell: (row) => row.done, key: (row) => row.done, numeric: true, falling: true },
            { name: "Not answered", cell: (row) => row.lost, key: (row) => row.lost, numeric: true, falling: true },
            { name: "Usual time", cell: (row) => duration(row.usual), key: (row) => row.usual ?? 0, numeric: true, falling: true },
          ]}
        />
      </details>
    </Card>
  );
}

function HeatKey() {
  return (
    <span class="keys">
      <span class="key"><span class="heat-key" aria-hidden="true">{[0, 1, 2, 3].map((at) => <svg key={at} class="swatch" viewBox="0 0 1 1"><rect class={`heat-${at}`} width="1" height="1" /></svg>)}</span> quick to slow</span>
      <span class="key"><svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class="heat-lost" width="1" height="1" /></svg> did not answer</span>
    </span>
  );
}

function told(cell: { readonly state: string; readonly seconds: number | null; readonly boundary: string }): string {
  const how = { arrived: `done in ${duration(cell.seconds)}`, lost: "did not answer", leased: "is training", offered: "is invited", expired: "did not answer", failed: "gave up" }[cell.state] ?? cell.state;
  return `${how}, from ${printable(cell.boundary, 40)}`;
}

function gathered(seats: Seats): { rows: readonly HeatRow[]; rounds: readonly number[]; typical: ReadonlyMap<number, number> } {
  const rounds = [...new Set(seats.seats.map((seat) => seat.round))].sort((a, b) => a - b);
  const cells = new Map<string, Map<number, { state: string; seconds: number | null; boundary: string }>>();
  const put = (device: string, seat: Seat, state: string): void => {
    const known = cells.get(device) ?? new Map<number, { state: string; seconds: number | null; boundary: string }>();
    cells.set(device, known.set(seat.round, { state, seconds: state === "arrived" ? seat.seconds : null, boundary: seat.boundary }));
  };
  for (const seat of seats.seats) for (const device of seat.lost) put(device, seat, "lost");
  const newest = rounds.at(-1);
  for (const seat of seats.seats) {
    const left = ["leased", "uploaded"].includes(seat.state) && seat.round !== newest; // the round closed without it
    if (left || !seat.lost.includes(seat.device) || seat.state === "arrived") put(seat.device, seat, left ? "lost" : seat.state);
  }
  const typical = new Map(rounds.map((round) => [round, median(seats.seats.filter((seat) => seat.round === round && seat.seconds !== null).map((seat) => seat.seconds!)) ?? 0]));
  const rows = [...cells].map(([device, own]) => {
    const states = [...own.values()];
    const lost = states.filter((known) => ["lost", "expired", "failed"].includes(known.state)).length;
    return { device, name: seats.devices[device] ?? device, cells: own, lost, done: states.filter((known) => known.state === "arrived").length, usual: median(states.flatMap((known) => known.seconds ?? [])) };
  });
  rows.sort((a, b) => b.lost - a.lost || (b.usual ?? 0) - (a.usual ?? 0) || a.name.localeCompare(b.name));
  return { rows, rounds, typical };
}

function paint(canvas: HTMLCanvasElement, rows: readonly HeatRow[], rounds: readonly number[], typical: ReadonlyMap<number, number>, labels: number, cell: number): void {
  const [width, height] = [Math.ceil(labels + cell * rounds.length + 4), TOP + ROW * rows.length + 2];
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.scale(scale, scale);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const shades = [0, 1, 2, 3].map((at) => colour(`--heat-${at}`));
  const [ink, quiet, lost, ground] = ["--ink", "--quiet", "--heat-lost", "--track"].map(colour) as [string, string, string, string];
  context.fillStyle = quiet;
  context.textAlign = "center";
  const every = Math.max(1, Math.ceil(34 / cell));
  rounds.forEach((round, at) => at % every === 0 && context.fillText(String(round), labels + cell * at + cell / 2, TOP / 2));
  context.textAlign = "left";
  rows.forEach((row, line) => {
    const y = TOP + ROW * line;
    context.fillStyle = ink;
    context.fillText(fitted(context, printable(row.name, 60), labels - 10), 0, y + ROW / 2);
    rounds.forEach((round, at) => {
      const known = row.cells.get(round);
      const slow = (known?.seconds ?? 0) / (typical.get(round) || 1);
      const shade = known === undefined || known.state === "offered" ? ground : known.state === "arrived" ? shades[slow < 0.75 ? 0 : slow < 1.25 ? 1 : slow < 2 ? 2 : 3]! : known.state === "leased" || known.state === "uploaded" ? quiet : lost;
      context.fillStyle = shade;
      context.fillRect(labels + cell * at + 0.5, y + 1, cell - 1, ROW - 2);
    });
  });
}

function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
