/** One job: how it learns, the round that is open, who trained what, and its versions. */
import { useMemo, useState } from "preact/hooks";

import { ask, type Job as JobDocument, type Metric, type Round, type Seats, type Version } from "./api.ts";
import { Chart, type Line } from "./chart.tsx";
import { HeatMap, Layers } from "./coverage.tsx";
import { duration, moment, percent, score, size } from "./format.ts";
import { OVER } from "./jobs.tsx";
import { useGrowing, useLive, useStream, type Happened, type Loaded } from "./live.ts";
import { Badge, Bar, Card, Confirm, Empty, Fact, Heading, Outside, Pending, Table, Wrong } from "./parts.tsx";
import { LiveRound } from "./round.tsx";

const HISTORY = 60; // rounds of the heat map
const SETTLES = ["RoundCommitted", "Evaluated", "JobState", "RoundAbandoned"];

export function Job({ id }: { readonly id: string }) {
  const job = useLive<JobDocument>(`/v1/jobs/${id}`, (event) => event.job === id || event.kind === "fleet");
  if (job.value !== undefined) return <Found job={job} found={job.value} />;
  return (
    <>
      <Heading back={{ href: "#/", text: "Jobs" }}>Job</Heading>
      {job.missing ? <Card><Empty title="There is no such job"><p>It was deleted, or it never was. <a href="#/">All jobs</a></p></Empty></Card> : <Pending of={job} />}
    </>
  );
}

function Found({ job, found }: { readonly job: Loaded<JobDocument>; readonly found: JobDocument }) {
  const { id } = found;
  const mine = (event: Happened): boolean => event.job === id;
  const settles = (event: Happened): boolean => event.job === id && SETTLES.includes(event.kind);
  const rounds = useGrowing<Round>(`/v1/jobs/${id}/rounds`, "first_round", (row) => row.number, settles);
  const metrics = useGrowing<Metric>(`/v1/jobs/${id}/metrics`, "first_version", (row) => row.version, settles);
  const open = useLive<Seats>(`/v1/jobs/${id}/seats?rounds=1`, mine);
  const history = useLive<Seats>(`/v1/jobs/${id}/seats?rounds=${HISTORY}`, settles);
  const versions = useLive<readonly Version[]>(`/v1/jobs/${id}/versions`, settles);
  const last = rounds.value?.findLast((round) => round.state === "committed");
  return (
    <>
      <div class="title">
        <Heading back={{ href: "#/", text: "Jobs" }}><Outside text={found.name} most={100} /> <Badge state={found.state} /></Heading>
        <Actions job={found} changed={job.again} />
      </div>
      {job.wrong && <Wrong>{job.wrong}</Wrong>}
      {found.message && <p class={found.state === "failed" ? "wrong banner" : "banner"} role="status"><Outside text={found.message} most={500} /></p>}
      <dl class="tiles">
        <div class="tile wide"><dt>Rounds</dt><dd>{found.version} <small>of {found.plan.num_rounds}</small><Bar share={found.version / found.plan.num_rounds} label="rounds that are done" tone={found.state === "failed" ? "bad" : "good"} /></dd></div>
        <Tile name="Best" value={found.best ? score(found.best.metric, found.best.value) : "–"} more={found.best ? `${found.best.metric.replaceAll("_", " ")}, version ${found.best.version}` : "no version was scored"} />
        <Tile name="Training loss" value={last?.summary.loss == null ? "–" : score("loss", last.summary.loss)} more="of the last round" />
        <Tile name="Last round" value={last ? duration((last.closed_at ?? last.opened_at) - last.opened_at) : "–"} more={last ? `${last.summary.updates ?? 0} updates, ${size(last.summary.bytes_up)}` : ""} />
      </dl>
      <div class="grid two">
        {!OVER.includes(found.state) && <LiveRound job={found} seats={open.value} />}
        <Learning rounds={rounds.value} metrics={metrics.value} />
        {history.value && last && <Layers seats={history.value} rounds={rounds.value ?? []} />}
        {history.value && last && <HeatMap seats={history.value} />}
        <Versions job={found} versions={versions.value} />
        <div class="column">
          <Plan job={found} />
          <Log job={id} names={history.value?.devices ?? {}} />
        </div>
      </div>
    </>
  );
}

function Tile({ name, value, more }: { readonly name: string; readonly value: string; readonly more: string }) {
  return <div class="tile"><dt>{name}</dt><dd>{value}<small class="below">{more}</small></dd></div>;
}

function Actions({ job, changed }: { readonly job: JobDocument; readonly changed: () => void }) {
  const [wrong, setWrong] = useState("");
  const act = async (what: string): Promise<void> => {
    try {
      await ask(`/v1/jobs/${job.id}/${what}`, "POST");
      setWrong("");
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
    }
    changed();
  };
  const remove = async (): Promise<void> => {
    await ask(`/v1/jobs/${job.id}`, "DELETE");
    location.hash = "#/";
  };
  return (
    <div class="row" role="group" aria-label="Job">
      {wrong && <Wrong>{wrong}</Wrong>}
      {job.state === "running" && <button onClick={() => void act("pause")}>Pause</button>}
      {job.state === "paused" && <button class="main" onClick={() => void act("resume")}>Resume</button>}
      {!OVER.includes(job.state) && (
        <Confirm label="Stop" title="Stop this job?" yes="Stop it" act={() => act("stop")}>
          <p>It is over for good. Its newest weights stay, and can be exported.</p>
        </Confirm>
      )}
      {OVER.includes(job.state) && (
        <Confirm label="Delete" title="Delete this job?" yes="Delete it" act={remove}>
          <p>Its versions and results go, and the bundle and the data that no other job uses. Export what you want to keep first.</p>
        </Confirm>
      )}
    </div>
  );
}

function Learning({ rounds, metrics }: { readonly rounds: readonly Round[] | undefined; readonly metrics: readonly Metric[] | undefined }) {
  const drawn = useMemo(() => {
    const scores = (name: string, title: string, dashed = false): readonly Line[] => {
      const values = new Map((metrics ?? []).filter((row) => row.name === name).map((row) => [row.version, row.value]));
      return values.size > 0 ? [{ name: title, values, dashed }] : [];
    };
    const committed = (rounds ?? []).filter((round) => round.state === "committed");
    const of = (title: string, value: (round: Round) => number | null | undefined): readonly Line[] => {
      const values = new Map(committed.flatMap((round) => (value(round) == null ? [] : [[round.number + 1, value(round)!] as const])));
      return values.size > 0 ? [{ name: title, values }] : [];
    };
    return {
      accuracy: [...scores("accuracy", "Coordinator's data"), ...scores("device_accuracy", "Devices' data", true)],
      loss: [...of("Training", (round) => round.summary.loss), ...scores("mean_loss", "Coordinator's data"), ...scores("device_mean_loss", "Devices' data", true)],
      bytes: of("Received", (round) => round.summary.bytes_up),
      seconds: of("Seconds", (round) => (round.closed_at ?? round.opened_at) - round.opened_at),
    };
  }, [rounds, metrics]);
  const nothing = Object.values(drawn).every((lines) => lines.length === 0);
  return (
    <Card title="Learning" wide>
      {rounds === undefined ? <div class="loading" role="status" /> : nothing ? <Empty title="No round is done yet"><p>Accuracy, loss and bytes appear with the first one.</p></Empty> : null}
      <div class="charts">
        {drawn.accuracy.length > 0 && <Chart title="Accuracy" x="Version" lines={drawn.accuracy} show={percent} />}
        {drawn.loss.length > 0 && <Chart title="Loss" x="Version" lines={drawn.loss} show={(value) => String(Number(value.toPrecision(3)))} />}
        {drawn.bytes.length > 0 && <Chart title="Bytes received" x="Round" lines={drawn.bytes} show={size} bars />}
        {drawn.seconds.length > 0 && <Chart title="Time of a round" x="Round" lines={drawn.seconds} show={duration} bars />}
      </div>
    </Card>
  );
}

function Versions({ job, versions }: { readonly job: JobDocument; readonly versions: readonly Version[] | undefined }) {
  return (
    <Card title="Versions" side={<span class="quiet">the newest two and the best are kept</span>}>
      {versions === undefined ? <div class="loading" role="status" /> : (
        <Table
          caption="Versions whose weights are here"
          rows={versions}
          id={(row) => String(row.version)}
          columns={[
            { name: "Version", cell: (row) => <span class="row tight">{row.version} {row.newest && <Badge state="running" text="newest" />} {row.best && <Badge state="done" text="best" />}<small class="quiet whole-line">{size(row.bytes)}</small></span> },
            { name: "Scores", cell: (row) => (Object.keys(row.scores).length === 0 ? <span class="quiet">–</span> : Object.entries(row.scores).map(([name, value]) => <div key={name} class="whole-line"><Outside text={`${name.replaceAll("_", " ")} ${score(name, value)}`} /></div>)) },
            {
              name: "Download",
              cell: (row) => (
                <span class="row tight">
                  <a class="button small" download href={`/v1/jobs/${job.id}/versions/${row.version}/bundle.zip`}>Bundle<span class="visually-hidden"> of version {row.version}</span></a>
                  <a class="button small" download={`version-${row.version}.safetensors`} href={`/v1/jobs/${job.id}/versions/${row.version}/file`}>Weights<span class="visually-hidden"> of version {row.version}</span></a>
                </span>
              ),
            },
          ]}
        />
      )}
      <p class="quiet">The bundle is a folder that <code>embrace.load</code> reads; its <code>to_onnx</code> and <code>to_torch</code> write the model for other programs.</p>
    </Card>
  );
}

const LOGGED: Readonly<Record<string, (body: Readonly<Record<string, unknown>>, name: string) => string>> = {
  RoundCommitted: (body) => `Round ${body.round} is done: version ${body.version}`,
  Evaluated: (body) => ("error" in body ? `Version ${body.version} could not be scored: ${body.error}` : `Version ${body.version} was scored`),
  JobState: (body) => `The job is ${body.state}${body.message ? `: ${body.message}` : ""}`,
  JobCreated: () => "The job was created",
  TaskFailed: (body, name) => `${name} gave its task up: ${body.reason}${body.message ? `, ${body.message}` : ""}`,
  DeviceBenched: (body, name) => `${name} gets no task for ${duration(Number(body.seconds))}`,
  DeviceUnfit: (body, name) => `${name} cannot take part: ${body.message}`,
  RejectUpdate: (body, name) => `An update of ${name} does not count: ${body.reason}`,
  WarnLayerUncovered: (body) => `No device trains ${[body.layers ?? body.layer].flat().join(", ")}`,
  RoundAbandoned: (body) => `Round ${body.round} was given up: ${body.reason}`,
  SumLost: (body) => `${body.updates} updates of round ${body.round} are folded again: ${body.message}`,
  UpdateLost: (body, name) => `The update of ${name} is lost: ${body.message}`,
  CloseFailed: (body) => `Round ${body.round} could not be closed: ${body.message}`,
};

function Log({ job, names }: { readonly job: string; readonly names: Readonly<Record<string, string>> }) {
  const { recent } = useStream();
  const shown = recent.filter((event) => event.job === job && event.kind in LOGGED).slice(0, 8);
  return (
    <Card title="What happens" side={<span class="quiet">since this page was opened</span>}>
      {shown.length === 0 ? <p class="quiet">Nothing yet.</p> : (
        <ol class="log">
          {shown.map((event) => (
            <li key={event.id}>
              <time dateTime={new Date(1000 * event.at).toISOString()}>{new Date(1000 * event.at).toLocaleTimeString()}</time>
              <Outside text={LOGGED[event.kind]!(event.body, names[String(event.body.device)] ?? String(event.body.device ?? ""))} most={220} />
            </li>
          ))}
        </ol>
      )}
    </Card>
  );
}

function Plan({ job }: { readonly job: JobDocument }) {
  return (
    <Card title="The job">
      <dl class="facts">
        <Fact name="Algorithm">{job.plan.algorithm || "as written in the job"}</Fact>
        <Fact name="Created">{moment(job.created_at)}</Fact>
        <Fact name="Id"><code>{job.id}</code></Fact>
        <Fact name="Bundle"><code title={job.bundle}>{job.bundle.slice(0, 16)}…</code></Fact>
      </dl>
      <details>
        <summary>All of its settings</summary>
        <pre>{JSON.stringify(job.plan, null, 2)}</pre>
      </details>
      <p class="quiet">Tables: <a href={`/v1/jobs/${job.id}/rounds.csv`} download>rounds</a>, <a href={`/v1/jobs/${job.id}/metrics.csv`} download>scores</a>, <a href={`/v1/jobs/${job.id}/timings.csv`} download>timings</a> as CSV.</p>
    </Card>
  );
}
