/** All jobs, and what the fleet does. */
import type { Job, Metric, Round } from "./api.ts";
import { Spark } from "./chart.tsx";
import { ago, count, moment, score } from "./format.ts";
import { useGrowing, useLive, useNow, useStream } from "./live.ts";
import { Badge, Bar, Card, Empty, Heading, Outside, Pending, Table, type Column } from "./parts.tsx";

const DRAWN = 6; // jobs that have a card; the others are lines of a table
const SETTLES = ["RoundCommitted", "Evaluated", "JobState", "JobCreated", "RoundAbandoned"];
const STATES = ["working", "waiting", "benched", "gone"];
export const OVER = ["done", "stopped", "failed"];

export function Jobs() {
  const jobs = useLive<readonly Job[]>("/v1/jobs", (event) => SETTLES.includes(event.kind));
  const { fleet } = useStream();
  const now = useNow(true);
  const sorted = [...(jobs.value ?? [])].sort((a, b) => Number(OVER.includes(a.state)) - Number(OVER.includes(b.state)) || b.created_at - a.created_at);
  return (
    <>
      <div class="title">
        <Heading>Jobs</Heading>
        <a class="button main" href="#/new">New job</a>
      </div>
      <dl class="tiles">
        <div class="tile"><dt>Jobs running</dt><dd>{jobs.value ? jobs.value.filter((job) => job.state === "running").length : "–"}</dd></div>
        {STATES.map((state) => (
          <div class="tile" key={state}><dt>Devices {state}</dt><dd>{fleet[state] ?? 0}</dd></div>
        ))}
      </dl>
      {jobs.value === undefined ? <Pending of={jobs} /> : sorted.length === 0 ? <NoJobs /> : null}
      <div class="grid">
        {sorted.slice(0, DRAWN).map((job) => <JobCard key={job.id} job={job} now={now} />)}
      </div>
      {sorted.length > DRAWN && (
        <Card title="Earlier" wide>
          <Table caption="Earlier jobs" columns={columns(now)} rows={sorted.slice(DRAWN)} id={(job) => job.id} />
        </Card>
      )}
    </>
  );
}

function NoJobs() {
  return (
    <Card>
      <Empty title="No job yet">
        <p>A job trains one model on the devices that are here. <a href="#/new">Create one</a>, or from a terminal:</p>
        <pre>embrace job create job.toml</pre>
        <p>Devices join <a href="#/join">by a link or a QR code</a>, or with <code>embrace agent</code>.</p>
      </Empty>
    </Card>
  );
}

function columns(now: number): readonly Column<Job>[] {
  return [
    { name: "Job", cell: (job) => <a href={`#/jobs/${job.id}`}><Outside text={job.name} /></a>, key: (job) => job.name },
    { name: "State", cell: (job) => <Badge state={job.state} />, key: (job) => job.state },
    { name: "Rounds", cell: (job) => `${job.version} of ${job.plan.num_rounds}`, key: (job) => job.version, numeric: true, falling: true },
    { name: "Algorithm", cell: (job) => job.plan.algorithm || "–", key: (job) => job.plan.algorithm },
    { name: "Created", cell: (job) => <span title={moment(job.created_at)}>{ago(job.created_at, now)}</span>, key: (job) => job.created_at, falling: true },
  ];
}

function JobCard({ job, now }: { readonly job: Job; readonly now: number }) {
  const mine = (event: { job: string; kind: string }): boolean => event.job === job.id && SETTLES.includes(event.kind);
  const metrics = useGrowing<Metric>(`/v1/jobs/${job.id}/metrics`, "first_version", (row) => row.version, mine);
  const rounds = useGrowing<Round>(`/v1/jobs/${job.id}/rounds`, "first_round", (row) => row.number, mine);
  const scored = ["accuracy", "device_accuracy"].find((name) => metrics.value?.some((row) => row.name === name));
  const values = scored ? metrics.value!.filter((row) => row.name === scored).map((row) => row.value) : (rounds.value ?? []).flatMap((row) => row.summary.loss ?? []);
  const what = scored ?? "loss";
  const last = values.at(-1);
  return (
    <section class="card job">
      <header>
        <h2><a href={`#/jobs/${job.id}`}><Outside text={job.name} most={60} /></a></h2>
        <Badge state={job.state} />
      </header>
      <div class="figures">
        <div><span class="big">{last === undefined ? "–" : score(what, last)}</span><span class="quiet">{last === undefined ? "no round is done" : what === "loss" ? "training loss" : what.replace("_", " ")}</span></div>
        <Spark values={values} label={`${what} over ${values.length} rounds`} />
      </div>
      <Bar share={job.version / job.plan.num_rounds} label={`${job.version} of ${job.plan.num_rounds} rounds`} tone={job.state === "failed" ? "bad" : job.state === "running" ? "good" : "off"} />
      <p class="quiet spread"><span>{job.version} of {count(job.plan.num_rounds, "round")}</span><span title={moment(job.created_at)}>{ago(job.created_at, now)}</span></p>
      {job.message && <p class={job.state === "failed" ? "wrong" : "quiet"}><Outside text={job.message} most={200} /></p>}
    </section>
  );
}
