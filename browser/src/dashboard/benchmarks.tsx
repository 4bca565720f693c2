/** What training costs on the devices, measured by themselves: time and memory from every boundary, side by side. */
import { useMemo, useState } from "preact/hooks";

import { Chart, type Line } from "./chart.tsx";
import { ago, count, duration, size } from "./format.ts";
import { useLive, useNow } from "./live.ts";
import { Badge, Card, Empty, Heading, Outside, Parts, Pending, Table } from "./parts.tsx";

interface Cost {
  readonly boundary: string;
  readonly tiers: readonly string[];
  readonly seconds: { readonly load: number; readonly frozen_forward: number; readonly activation_io: number; readonly training: number; readonly optimiser: number } | null;
  readonly memory: number | null;
  readonly problem: string;
}

interface Measured {
  readonly device: string;
  readonly name: string;
  readonly at: number;
  readonly benchmark: {
    readonly bundle: string;
    readonly model: string;
    readonly batch: number;
    readonly runtime: string;
    readonly threads: number;
    readonly costs: readonly Cost[];
    readonly processor: string;
    readonly system: string;
  };
}

const MOST_LINES = 6; // devices in one chart
const key = ({ benchmark }: Measured): string => `${benchmark.bundle} ${benchmark.batch}`;
const own = ({ device, benchmark }: Measured): string => `${device} ${benchmark.threads} ${benchmark.runtime}`;
const label = ({ name, benchmark }: Measured): string => `${name} (${count(benchmark.threads, "thread")})`;

function batchSeconds({ seconds }: Cost): number | undefined {
  return seconds ? seconds.frozen_forward + seconds.activation_io + seconds.training + seconds.optimiser : undefined;
}

export function Benchmarks() {
  const measured = useLive<readonly Measured[]>("/v1/benchmarks?limit=1000", (event) => event.kind === "benchmarks");
  const [picked, setPicked] = useState("");
  const [hidden, setHidden] = useState<ReadonlySet<string>>(new Set());
  const now = useNow(true);
  const all = measured.value ?? [];
  const models = [...new Map(all.map((row) => [key(row), row.benchmark])).entries()];
  const chosen = models.some(([name]) => name === picked) ? picked : (models[0]?.[0] ?? "");
  const rows = useMemo(() => all.filter((row) => key(row) === chosen), [measured.value, chosen]);
  const shown = rows.filter((row) => !hidden.has(own(row))).slice(0, MOST_LINES);
  const places = longest(rows);
  const lines = (value: (cost: Cost) => number | null | undefined): readonly Line[] =>
    shown.map((row) => ({
      name: label(row),
      values: new Map(row.benchmark.costs.flatMap((cost) => (value(cost) == null || !places.includes(cost.boundary) ? [] : [[places.indexOf(cost.boundary), value(cost)!] as const])).sort(([a], [b]) => a - b)),
    }));
  const turn = (name: string): void => setHidden((known) => (known.has(name) ? new Set([...known].filter((each) => each !== name)) : new Set([...known, name])));
  return (
    <>
      <Heading>Benchmarks</Heading>
      {measured.value === undefined ? <Pending of={measured} /> : rows.length === 0 ? (
        <Card>
          <Empty title="No device has measured anything yet">
            <p>A device measures what a batch costs it, from every boundary of a bundle, and sends the table:</p>
            <pre>embrace device bench --server {location.origin} --token TOKEN --submit</pre>
          </Empty>
        </Card>
      ) : (
        <div class="grid two">
          <Card title="Devices, side by side" wide>
            <label class="field">
              <span>Model and batch</span>
              <select value={chosen} onChange={(event) => setPicked(event.currentTarget.value)}>
                {models.map(([name, benchmark]) => <option key={name} value={name}>{benchmark.model}, batch {benchmark.batch} ({benchmark.bundle.slice(0, 8)})</option>)}
              </select>
            </label>
            <fieldset class="picks">
              <legend class="visually-hidden">Devices in the chart</legend>
              {rows.map((row) => (
                <label class="tick" key={own(row)}><input type="checkbox" checked={shown.includes(row)} disabled={!shown.includes(row) && !hidden.has(own(row))} onChange={() => turn(own(row))} /><span><Outside text={label(row)} most={60} /></span></label>
              ))}
            </fieldset>
            {rows.length > MOST_LINES && <p class="quiet">The chart has room for {MOST_LINES}: take one out to see another.</p>}
            <div class="charts">
              <Chart title="Time of a batch" x="From" lines={lines(batchSeconds)} show={duration} place={(at) => places[at] ?? ""} />
              <Chart title="Peak memory" x="From" lines={lines((cost) => cost.memory)} show={size} place={(at) => places[at] ?? ""} />
            </div>
          </Card>
          <Card title="All measurements" wide>
            <Table
              caption="What a batch costs on every device"
              rows={rows.flatMap((row) => row.benchmark.costs.map((cost) => ({ row, cost })))}
              id={({ row, cost }) => `${own(row)} ${cost.boundary}`}
              columns={[
                { name: "Device", cell: ({ row }) => <><a href={`#/devices/${row.device}`}><Outside text={label(row)} most={60} /></a><small class="below"><Outside text={[row.benchmark.processor, row.benchmark.system].filter(Boolean).join(", ") || row.benchmark.runtime} most={80} /></small></>, key: ({ row }) => label(row) },
                { name: "From", cell: ({ cost }) => <><Outside text={cost.boundary} most={40} /> {cost.tiers.map((tier) => <Badge key={tier} state="idle" text={tier.slice(0, 24)} />)}</>, key: ({ cost }) => places.indexOf(cost.boundary) },
                { name: "A batch", cell: ({ cost }) => (cost.seconds ? <span class="meter"><span>{duration(batchSeconds(cost))}</span><Parts seconds={{ forward: cost.seconds.frozen_forward, activation_io: cost.seconds.activation_io, training: cost.seconds.training + cost.seconds.optimiser }} /></span> : <span class="error"><Outside text={cost.problem} most={120} /></span>), key: ({ cost }) => batchSeconds(cost) ?? Infinity },
                { name: "Load", cell: ({ cost }) => duration(cost.seconds?.load), key: ({ cost }) => cost.seconds?.load ?? 0, numeric: true, falling: true },
                { name: "Peak memory", cell: ({ cost }) => size(cost.memory), key: ({ cost }) => cost.memory ?? 0, numeric: true, falling: true },
                { name: "Measured", cell: ({ row }) => ago(row.at, now), key: ({ row }) => row.at, falling: true },
              ]}
            />
          </Card>
        </div>
      )}
    </>
  );
}

/** The boundaries in the order of the model, as the device that measured most has them. */
function longest(rows: readonly Measured[]): readonly string[] {
  const names = rows.map((row) => row.benchmark.costs.map((cost) => cost.boundary)).sort((a, b) => b.length - a.length);
  return [...new Set(names.flat())];
}
