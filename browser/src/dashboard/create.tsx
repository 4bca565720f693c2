/** A new job: a form that writes a job file, and the job file itself. Both go the same way. */
import { useEffect, useMemo, useState } from "preact/hooks";

import { ask, Refusal, type Choices } from "./api.ts";
import { compact, size } from "./format.ts";
import { useLive } from "./live.ts";
import { Card, Empty, Heading, Outside, Pending, Wrong } from "./parts.tsx";
import { sendBundle } from "./upload.ts";

interface Answers {
  readonly name: string;
  readonly algorithm: string;
  readonly rounds: number;
  readonly count: string;
  readonly least: number;
  readonly steps: number;
  readonly batch: number;
  readonly rate: string;
  readonly data: string;
  readonly onDevices: boolean;
}

const FIRST: Answers = { name: "", algorithm: "embracing", rounds: 20, count: "", least: 2, steps: 10, batch: 32, rate: "0.05", data: "", onDevices: false };

/** Write a job file. JSON's strings are TOML's. */
export function jobFile(bundle: string, answers: Answers): string {
  const { name, algorithm, rounds, count, least, steps, batch, rate, data, onDevices } = answers;
  const lines = [`bundle = ${JSON.stringify(bundle)}`, ...(name ? [`name = ${JSON.stringify(name)}`] : []), ...(algorithm ? [`algorithm = ${JSON.stringify(algorithm)}`] : []), `num_rounds = ${rounds}`];
  lines.push("", "[participate]", ...(count ? [`count = ${Number(count)}`] : []), `min_available = ${least}`);
  lines.push("", "[local]", `steps = ${steps}`, `batch = ${batch}`, `rate = ${JSON.stringify(rate)}`);
  if (data || onDevices) lines.push("", "[evaluate]", ...(data ? [`data = ${JSON.stringify(data)}`] : []), ...(onDevices ? ["on_devices = true"] : []));
  return `${lines.join("\n")}\n`;
}

export function Create() {
  const choices = useLive<Choices>("/v1/choices", (event) => ["JobCreated", "JobState"].includes(event.kind));
  const [digest, setDigest] = useState("");
  const [way, setWay] = useState<"form" | "file">("form");
  const [answers, setAnswers] = useState(FIRST);
  const [text, setText] = useState("");
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  const bundles = choices.value?.bundles ?? [];
  const chosen = bundles.find((bundle) => bundle.digest === digest) ?? bundles.at(-1);
  const written = useMemo(() => jobFile(chosen?.name ?? "", answers), [chosen, answers]);
  useEffect(() => {
    if (chosen && digest === "") setAnswers((known) => ({ ...known, batch: chosen.batch }));
  }, [chosen?.digest]);
  const create = async (event: Event): Promise<void> => {
    event.preventDefault();
    if (chosen === undefined) return;
    setBusy(true);
    setWrong("");
    try {
      const { plan } = await ask<{ plan: unknown }>("/v1/plans", "POST", { toml: way === "form" ? written : text });
      const { id } = await ask<{ id: string }>("/v1/jobs", "POST", { bundle: chosen.digest, plan });
      location.hash = `#/jobs/${id}`;
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
    }
    setBusy(false);
  };
  const turn = (to: "form" | "file"): void => {
    if (to === "file" && way === "form") setText(written);
    setWay(to);
  };
  const move = (event: KeyboardEvent): void => {
    turn(way === "form" ? "file" : "form");
    (event.currentTarget as HTMLElement).querySelector<HTMLElement>('[aria-selected="false"]')?.focus();
  };
  return (
    <>
      <Heading back={{ href: "#/", text: "Jobs" }}>New job</Heading>
      {choices.value === undefined ? <Pending of={choices} /> : (
        <form class="grid two form" onSubmit={(event) => void create(event)}>
          <Card title="The model">
            {bundles.length === 0 ? (
              <Empty title="No bundle is here yet"><p>Export a model (<code>embrace export</code>) and send its folder.</p></Empty>
            ) : (
              <label class="field">
                <span>Bundle</span>
                <select value={chosen?.digest} onChange={(event) => setDigest(event.currentTarget.value)}>
                  {bundles.map((bundle) => <option key={bundle.digest} value={bundle.digest}>{bundle.name}: {bundle.layers} layers, {compact(bundle.parameters)} parameters, {size(bundle.bytes)} ({bundle.digest.slice(0, 8)})</option>)}
                </select>
              </label>
            )}
            {chosen && Object.keys(chosen.tiers).length > 0 && <p class="quiet">Tiers: <Outside text={Object.entries(chosen.tiers).map(([tier, boundary]) => `${tier} from ${boundary}`).join(", ")} most={200} /></p>}
            <Upload sent={(sent) => (setDigest(sent), choices.again())} />
          </Card>
          <Card title="The job">
            <div class="tabs" role="tablist" aria-label="How to write the job" onKeyDown={(event) => ["ArrowLeft", "ArrowRight"].includes(event.key) && move(event)}>
              <Tab name="Form" on={way === "form"} press={() => turn("form")} />
              <Tab name="Job file" on={way === "file"} press={() => turn("file")} />
            </div>
            <div role="tabpanel" id="way" aria-label={way === "form" ? "Form" : "Job file"}>
              {way === "form" ? <Form answers={answers} choices={choices.value} change={(part) => setAnswers((known) => ({ ...known, ...part }))} /> : (
                <label class="field">
                  <span>job.toml</span>
                  <textarea class="code" rows={18} spellcheck={false} value={text} onInput={(event) => setText(event.currentTarget.value)} />
                </label>
              )}
            </div>
            {wrong && <Wrong>{wrong}</Wrong>}
            <div class="row"><button class="main" disabled={busy || chosen === undefined}>Create job</button></div>
          </Card>
        </form>
      )}
    </>
  );
}

function Tab({ name, on, press }: { readonly name: string; readonly on: boolean; readonly press: () => void }) {
  return <button type="button" role="tab" tabIndex={on ? 0 : -1} aria-selected={on} aria-controls="way" onClick={press}>{name}</button>;
}

interface FormProps {
  readonly answers: Answers;
  readonly choices: Choices;
  readonly change: (part: Partial<Answers>) => void;
}

function Form({ answers, choices, change }: FormProps) {
  const note = choices.algorithms.find((known) => known.name === answers.algorithm);
  const number = (name: "rounds" | "least" | "steps" | "batch", label: string, hint: string) => (
    <label class="field"><span>{label}</span><input type="number" min={1} required value={answers[name]} onInput={(event) => change({ [name]: event.currentTarget.valueAsNumber })} /><small class="quiet">{hint}</small></label>
  );
  return (
    <>
      <label class="field"><span>Name</span><input type="text" maxLength={200} value={answers.name} placeholder="as the bundle" onInput={(event) => change({ name: event.currentTarget.value })} /></label>
      <label class="field">
        <span>Algorithm</span>
        <select value={answers.algorithm} onChange={(event) => change({ algorithm: event.currentTarget.value })}>
          {choices.algorithms.map((known) => <option key={known.name} value={known.name}>{known.name}</option>)}
        </select>
        {note && <small class="quiet">{note.note}. {note.paper}</small>}
      </label>
      <div class="pair">
        {number("rounds", "Rounds", "versions that it makes")}
        {number("least", "Devices to begin", "a round waits for so many")}
        <label class="field"><span>Devices of a round</span><input type="number" min={1} value={answers.count} placeholder="all" onInput={(event) => change({ count: event.currentTarget.value })} /><small class="quiet">drawn anew each time</small></label>
        {number("steps", "Steps", "of a device in a round")}
        {number("batch", "Batch", "samples of a step")}
        <label class="field"><span>Learning rate</span><input type="text" required value={answers.rate} onInput={(event) => change({ rate: event.currentTarget.value })} /><small class="quiet">a number or a schedule</small></label>
      </div>
      <label class="field">
        <span>Evaluation data</span>
        <select value={answers.data} onChange={(event) => change({ data: event.currentTarget.value })}>
          <option value="">none</option>
          {choices.evaluation_data.map((data) => <option key={data.sha256} value={`sha256:${data.sha256}`}>{data.sha256.slice(0, 12)}…, {size(data.bytes)}</option>)}
        </select>
        <small class="quiet">uploaded with an earlier job, or by <code>embrace job create</code></small>
      </label>
      <label class="tick"><input type="checkbox" checked={answers.onDevices} onChange={(event) => change({ onDevices: event.currentTarget.checked })} /><span>Devices score every version on data that they hold out</span></label>
    </>
  );
}

function Upload({ sent }: { readonly sent: (digest: string) => void }) {
  const [state, setState] = useState("");
  const [wrong, setWrong] = useState("");
  const pick = async (files: FileList | null): Promise<void> => {
    if (files === null || files.length === 0) return;
    setWrong("");
    try {
      sent(await sendBundle([...files], (done, total) => setState(`${done} of ${total} files sent`)));
      setState("Sent and checked");
    } catch (error) {
      setState("");
      setWrong(error instanceof Refusal || error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <>
      <label class="field">
        <span>Send a bundle from this computer</span>
        <input type="file" {...{ webkitdirectory: true }} onChange={(event) => void pick(event.currentTarget.files)} />
        <small class="quiet" role="status">{state || "the folder that embrace export wrote"}</small>
      </label>
      {wrong && <Wrong>{wrong}</Wrong>}
    </>
  );
}
