/** One device: what it may take, where its time goes, how it does in every job. */
import { ask, type DeviceReport, type Fleet, type FleetDevice } from "./api.ts";
import { ago, duration, moment, size } from "./format.ts";
import { useLive, useNow, type Happened } from "./live.ts";
import { Badge, Card, Confirm, Empty, Fact, Heading, Memory, Outside, Parts, PartsTable, Pending, Table } from "./parts.tsx";

export function Device({ id }: { readonly id: string }) {
  const concerns = (event: Happened): boolean => event.kind === "fleet" || event.body.device === id || ["AcceptUpdate", "GrantLease", "RoundCommitted"].includes(event.kind);
  const report = useLive<DeviceReport>(`/v1/devices/${id}`, concerns);
  const fleet = useLive<Fleet>("/v1/fleet", (event) => ["fleet", "RoundCommitted"].includes(event.kind));
  const now = useNow(true);
  if (report.value === undefined) {
    return (
      <>
        <Heading back={{ href: "#/devices", text: "Devices" }}>Device</Heading>
        {report.missing ? <Card><Empty title="There is no such device"><p><a href="#/devices">All devices</a></p></Empty></Card> : <Pending of={report} />}
      </>
    );
  }
  const found = report.value;
  const glance = fleet.value?.devices.find((row) => row.id === id);
  const revoke = async (): Promise<void> => {
    await ask(`/v1/devices/${id}`, "DELETE");
    report.again();
  };
  return (
    <>
      <div class="title">
        <Heading back={{ href: "#/devices", text: "Devices" }}><Outside text={found.name} most={100} /> <Badge state={found.state} /></Heading>
        {!found.revoked && (
          <Confirm label="Shut out" title="Shut this device out?" yes="Shut it out" act={revoke}>
            <p>Its token is worth nothing from then on, and what it works on goes to others. It can come back with a new enrolment only.</p>
          </Confirm>
        )}
      </div>
      {found.unfit && <p class="wrong banner" role="status"><Outside text={found.unfit} most={500} /></p>}
      <dl class="tiles">
        <div class="tile"><dt>Updates</dt><dd>{found.tasks_done}<small class="below">{found.last_update_at === null ? "none yet" : `the last ${ago(found.last_update_at, now)}`}</small></dd></div>
        <div class="tile"><dt>Failures</dt><dd>{found.tasks_failed}<small class="below">{found.tasks_done + found.tasks_failed > 0 ? `of ${found.tasks_done + found.tasks_failed} tasks` : "no task yet"}</small></dd></div>
        <div class="tile"><dt>A task takes</dt><dd>{duration(found.seconds.wall)}<small class="below">median of the last 20</small></dd></div>
        <div class="tile"><dt>Heard of</dt><dd>{ago(found.seen_at, now)}<small class="below">{moment(found.seen_at)}</small></dd></div>
      </dl>
      <div class="grid two">
        <About device={found} glance={glance} now={now} />
        <div class="column"><Card title="Where its time goes">
          {found.seconds.wall === undefined ? <p class="quiet">It has sent no update yet.</p> : (
            <>
              <Parts seconds={found.seconds} />
              <PartsTable seconds={found.seconds} />
            </>
          )}
        </Card>
        <Card title="Last error">
          {found.last_error === null ? <p class="quiet">None.</p> : (
            <>
              <p><Badge state="failed" text={found.last_error.reason.slice(0, 64)} /> <span class="quiet">{moment(found.last_error.at)}, in <a href={`#/jobs/${found.last_error.job}`}>job {found.last_error.job}</a></span></p>
              <p class="error"><Outside text={found.last_error.message || "It said no more."} most={500} /></p>
            </>
          )}
        </Card></div>
        <Card title="Jobs" wide>
          {found.jobs.length === 0 ? <Empty title="It has taken part in no job yet" /> : (
            <Table
              caption="How the device does in every job"
              rows={found.jobs}
              id={(row) => row.job}
              columns={[
                { name: "Job", cell: (row) => <a href={`#/jobs/${row.job}`}><Outside text={row.name} most={60} /></a>, key: (row) => row.name },
                { name: "Trains from", cell: (row) => (row.boundary ? <Outside text={row.boundary} most={40} /> : "–"), key: (row) => row.boundary },
                { name: "Now", cell: (row) => (row.benched_until !== null ? <Badge state="benched" text={`benched for ${duration(Math.max(0, row.benched_until - now))}`} /> : row.task ? <Badge state={row.task} text={{ leased: "training", offered: "invited", arrived: "answered" }[row.task] ?? row.task} /> : <span class="quiet">no task</span>) },
                { name: "Updates", cell: (row) => row.done, key: (row) => row.done, numeric: true, falling: true },
                { name: "Failures", cell: (row) => row.failed, key: (row) => row.failed, numeric: true, falling: true },
                { name: "Last failure", cell: (row) => (row.reason ? <span class="error"><Outside text={`${row.reason}${row.message ? `: ${row.message}` : ""}`} most={120} /></span> : <span class="quiet">none</span>) },
              ]}
            />
          )}
        </Card>
      </div>
    </>
  );
}

function About({ device, glance, now }: { readonly device: DeviceReport; readonly glance: FleetDevice | undefined; readonly now: number }) {
  const { profile } = device;
  return (
    <Card title="The device">
      <dl class="facts">
        <Fact name="Memory"><Memory used={glance?.memory.process ?? glance?.memory.anonymous} allowed={glance?.memory.allowed ?? profile.memory} /></Fact>
        <Fact name="Budget for training">{profile.memory == null ? "no limit" : size(profile.memory)}</Fact>
        <Fact name="Tier">{profile.tier ? <Outside text={profile.tier} most={40} /> : "by its memory"}</Fact>
        <Fact name="Threads">{profile.threads ?? "–"}</Fact>
        <Fact name="Runtime">{profile.runtime ? <Outside text={profile.runtime} most={60} /> : "–"}</Fact>
        <Fact name="Engines">{(profile.engines ?? []).join(", ") || "–"}</Fact>
        <Fact name="Enrolled">{moment(device.enrolled_at)}</Fact>
        {device.benched_until !== null && <Fact name="Benched">for {duration(Math.max(0, device.benched_until - now))}</Fact>}
        <Fact name="Id"><code>{device.id}</code></Fact>
      </dl>
    </Card>
  );
}
