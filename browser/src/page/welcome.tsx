/** Before joining: what is trained, from which data, and what it may take. */
import { useState } from "preact/hooks";

import { messageOf } from "../federation/errors.ts";
import { DataSection } from "./data_section.tsx";
import { suggestedMemory, suggestedThreads, type BrowserDevice, type View } from "./device.ts";
import { memoryText, percent, size } from "./format.ts";
import { LayerBar } from "./layer_bar.tsx";
import { fitOf, type Offered } from "./offered.ts";

const MEMORIES = [64, 128, 256, 512, 1000, 2000]; // MB
const MB = 1e6;

interface Props {
  readonly device: BrowserDevice;
  readonly offered: readonly Offered[] | undefined;
  readonly enrolment: string;
  readonly joined: () => void;
}

export function Welcome({ device, offered, enrolment, joined }: Props) {
  const [name, setName] = useState(suggestedName);
  const [memory, setMemory] = useState(() => MB * (MEMORIES.findLast((each) => each * MB <= suggestedMemory()) ?? 64));
  const [pauseHidden, setHidden] = useState(false);
  const [pauseOnBattery, setOnBattery] = useState(true);
  const [pauseMetered, setMetered] = useState(true);
  const [busy, setBusy] = useState(false);
  const [wrong, setWrong] = useState("");
  const first = offered?.[0];
  const join = async (): Promise<void> => {
    setBusy(true);
    setWrong("");
    try {
      await device.join(enrolment, { name: name.trim(), memory, threads: suggestedThreads(), pauseHidden, pauseOnBattery, pauseMetered });
      joined();
    } catch (error) {
      setWrong(messageOf(error));
    }
    setBusy(false);
  };
  return (
    <>
      <p>This browser trains a part of a model on data that you pick. The data stays here; what leaves is how the model changes.</p>
      <section>
        <h2>1. What is trained</h2>
        {offered === undefined && <p class="quiet">Asking …</p>}
        {offered?.length === 0 && <p class="quiet">No job runs now; this page looks again.</p>}
        {offered?.map((each) => <About key={each.job.id} {...each} />)}
      </section>
      {first && <DataSection title="2. Your data" device={device} manifest={first.manifest} />}
      <section>
        <h2>3. What it may take</h2>
        <label class="field">
          <span>Memory</span>
          <select value={memory} onChange={(event) => setMemory(Number(event.currentTarget.value))}>
            {MEMORIES.map((each) => (
              <option key={each} value={each * MB}>{memoryText(each * MB)}</option>
            ))}
          </select>
        </label>
        {first && <WhatFits offered={first} memory={memory} />}
        <Tick checked={pauseOnBattery} set={setOnBattery}>Pause when the battery is below 30 %{levelOf(device.view)}</Tick>
        <Tick checked={pauseMetered} set={setMetered}>Pause on mobile data or a connection that saves data</Tick>
        <Tick checked={pauseHidden} set={setHidden}>Pause when this page is not visible</Tick>
        <p class="quiet">Training keeps the processor busy: plug a phone in. The screen stays on while it trains.</p>
        <label class="field">
          <span>Name of this device</span>
          <input type="text" value={name} maxLength={100} autocomplete="off" onInput={(event) => setName(event.currentTarget.value)} />
        </label>
      </section>
      {wrong && <p class="wrong" role="alert">{wrong}</p>}
      <button class="main" disabled={busy || first === undefined || device.data === undefined || !name.trim()} onClick={() => void join()}>
        {device.data === undefined ? "Pick data first" : "Join"}
      </button>
    </>
  );
}

function About({ job, manifest }: Offered) {
  const { classes, classCount, input } = manifest;
  const kind = input.shape.length === 3 ? "pictures" : input.dtype === "int64" ? "texts as numbers" : "numbers";
  return (
    <dl>
      <dt>Job</dt>
      <dd>{job.name}</dd>
      <dt>Model</dt>
      <dd>{manifest.name}: {manifest.layers.length} layers, {manifest.space.size.toLocaleString()} numbers</dd>
      <dt>Learns from</dt>
      <dd>{kind}, {input.shape.join(" × ") || "one each"}</dd>
      {classCount !== undefined && <dt>Classes</dt>}
      {classCount !== undefined && <dd>{classes ? classes.slice(0, 12).join(", ") + (classes.length > 12 ? ", …" : "") : classCount}</dd>}
      <dt>Rounds</dt>
      <dd>{job.round} of {job.rounds} done</dd>
      <dt>In each</dt>
      <dd>{job.epochs ? `${job.epochs} passes over your data` : `${job.steps} steps of ${job.batch} samples`}</dd>
    </dl>
  );
}

function WhatFits({ offered, memory }: { readonly offered: Offered; readonly memory: number }) {
  const fit = fitOf(offered, memory);
  if (fit === undefined) return <p class="wrong" role="alert">No part of the model fits; allow more.</p>;
  return (
    <div role="status">
      <LayerBar {...fit} />
      <p class="quiet">
        Trains {fit.trained} of {fit.layers} layers, from {fit.from}, in about {size(fit.need)}; downloads about {size(4 * offered.manifest.space.size)} a round.
      </p>
    </div>
  );
}

interface TickProps {
  readonly checked: boolean;
  readonly set: (on: boolean) => void;
  readonly children: preact.ComponentChildren;
}

function Tick({ checked, set, children }: TickProps) {
  return (
    <label class="tick">
      <input type="checkbox" checked={checked} onChange={(event) => set(event.currentTarget.checked)} />
      <span>{children}</span>
    </label>
  );
}

function levelOf({ battery }: View): string {
  return battery === undefined ? "" : ` (now ${percent(battery.level)})`;
}

function suggestedName(): string {
  const brand = /iPhone|iPad|Android|Macintosh|Windows|CrOS|Linux/.exec(navigator.userAgent)?.[0] ?? "browser";
  return `${brand} ${Math.random().toString(36).slice(2, 6)}`;
}
