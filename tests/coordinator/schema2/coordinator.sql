BEGIN TRANSACTION;
CREATE TABLE devices (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR NOT NULL, 
	token_hash VARCHAR(64) NOT NULL, 
	revoked BOOLEAN NOT NULL, 
	profile JSON NOT NULL, 
	enrolled_at DOUBLE NOT NULL, 
	seen_at DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (token_hash)
);
INSERT INTO "devices" VALUES('ca978112ca1b','a','c9793bdecb287cfad8c32c5499568e6595d81f1d82a36566d51ec7d29c626fc7',0,'{"memory": null, "tier": "strong", "boundary": null, "threads": 1, "runtime": "", "engines": ["portable"]}',1000000.0,1000000.0);
INSERT INTO "devices" VALUES('3e23e8160039','b','5a7a60a7d62c7b79ca6482b0f5adb279bd2ec191ff590089e7d21b612259c1f8',0,'{"memory": null, "tier": "moderate", "boundary": null, "threads": 1, "runtime": "", "engines": ["portable"]}',1000000.0,1000000.0);
INSERT INTO "devices" VALUES('2e7d2c03a950','c','773ffeeef5a1416c0efadac44c76e19fec26e30a7b2a1af91d4c9e19e343d406',0,'{"memory": null, "tier": "weak", "boundary": null, "threads": 1, "runtime": "", "engines": ["portable"]}',1000000.0,1000000.0);
CREATE TABLE enrolments (
	token_hash VARCHAR(64) NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	uses_left INTEGER NOT NULL, 
	PRIMARY KEY (token_hash)
);
INSERT INTO "enrolments" VALUES('0790e574f90845c99b577fe65965a768aaeef4b3d332ede093a090d2254d7c84',1000060.0,0);
INSERT INTO "enrolments" VALUES('e1bf6fe04d4f80a683e73ecf4fd6ed8b77a84fd2a4268a7648f4160a4aec01ae',1000060.0,0);
INSERT INTO "enrolments" VALUES('4f7f8dc869788439a1d5d45d25a84cf7c44662459044003c44eb46390444589e',1000060.0,0);
CREATE TABLE events (
	id INTEGER NOT NULL, 
	job VARCHAR(32) NOT NULL, 
	at DOUBLE NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	body JSON NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "events" VALUES(1,'d3ef1096d11357e9',1000000.0,'JobCreated','{"name": "tiny"}');
INSERT INTO "events" VALUES(2,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 0, "seat": {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["ca978112ca1b"]}}');
INSERT INTO "events" VALUES(3,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 0, "seat": {"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["3e23e8160039"]}}');
INSERT INTO "events" VALUES(4,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 0, "seat": {"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["2e7d2c03a950"]}}');
INSERT INTO "events" VALUES(5,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 0, "seat": {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["ca978112ca1b"]}}');
INSERT INTO "events" VALUES(6,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 0, "seat": {"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["3e23e8160039"]}}');
INSERT INTO "events" VALUES(7,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 0, "seat": {"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["2e7d2c03a950"]}}');
INSERT INTO "events" VALUES(8,'d3ef1096d11357e9',1000000.0,'AcceptUpdate','{"round": 0, "seat": {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["ca978112ca1b"]}}');
INSERT INTO "events" VALUES(9,'d3ef1096d11357e9',1000000.0,'AcceptUpdate','{"round": 0, "seat": {"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["3e23e8160039"]}}');
INSERT INTO "events" VALUES(10,'d3ef1096d11357e9',1000000.0,'AcceptUpdate','{"round": 0, "seat": {"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["2e7d2c03a950"]}}');
INSERT INTO "events" VALUES(11,'d3ef1096d11357e9',1000000.0,'CloseRound','{"round": 0, "seats": [{"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["3e23e8160039"]}, {"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["2e7d2c03a950"]}, {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["ca978112ca1b"]}]}');
INSERT INTO "events" VALUES(12,'d3ef1096d11357e9',1000000.0,'RoundCommitted','{"round": 0, "version": 1, "updates": 3, "samples": 6, "bytes_up": 872, "loss": null, "trainers": {"stem": 1, "body": 2, "head": 3}}');
INSERT INTO "events" VALUES(13,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 1, "seat": {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["ca978112ca1b"]}}');
INSERT INTO "events" VALUES(14,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 1, "seat": {"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["3e23e8160039"]}}');
INSERT INTO "events" VALUES(15,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 1, "seat": {"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["2e7d2c03a950"]}}');
INSERT INTO "events" VALUES(16,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 1, "seat": {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["ca978112ca1b"]}}');
INSERT INTO "events" VALUES(17,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 1, "seat": {"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["3e23e8160039"]}}');
INSERT INTO "events" VALUES(18,'d3ef1096d11357e9',1000000.0,'GrantLease','{"round": 1, "seat": {"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["2e7d2c03a950"]}}');
INSERT INTO "events" VALUES(19,'d3ef1096d11357e9',1000000.0,'AcceptUpdate','{"round": 1, "seat": {"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["ca978112ca1b"]}}');
CREATE TABLE jobs (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR NOT NULL, 
	bundle VARCHAR(64) NOT NULL, 
	"plan" JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	version INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	message VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "jobs" VALUES('d3ef1096d11357e9','tiny','4e92c49a6ae79be1247b91b97d2bea479949bda06eaf6867f7ac1992ff670be6','{"bundle": "tiny", "name": "", "num_rounds": 3, "seed": 0, "participate": {"fraction_train": 1.0, "count": null, "min_available": 3, "replacement": false, "window": 1, "over_select": 0.0, "quorum": 1.0, "deadline": null, "on_missing_quorum": "wait", "balance": true}, "cover": {"rule": "output_side"}, "local": {"steps": 10, "batch": 32, "rate": "0.05", "rules": [{"rule": "momentum", "factor": 0.9, "nesterov": false}], "refresh_every": 1, "activations": "float32", "crop": 0, "flip": false}, "weigh": {"by": "samples"}, "serve": {"rate": 1.0, "combine": "mean", "trim": 0.1, "clip_norm": null}, "evaluate": {"data": null, "every": 1}, "bounds": {"lease": 3600.0, "offer": 120.0, "max_value": 64.0, "max_norm": null, "max_samples": 1048576}}','running',1,1000000.0,'');
CREATE TABLE meta (
	"key" VARCHAR(64) NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema','2');
CREATE TABLE metrics (
	id INTEGER NOT NULL, 
	job VARCHAR(32) NOT NULL, 
	version INTEGER NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	value DOUBLE NOT NULL, 
	at DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(job) REFERENCES jobs (id)
);
CREATE TABLE rounds (
	job VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	body JSON NOT NULL, 
	summary JSON NOT NULL, 
	opened_at DOUBLE NOT NULL, 
	closed_at DOUBLE, 
	PRIMARY KEY (job, number), 
	FOREIGN KEY(job) REFERENCES jobs (id)
);
INSERT INTO "rounds" VALUES('d3ef1096d11357e9',0,'committed','{"number": 0, "seed": 0, "opened_at": 1000000.0, "lease": 3600.0, "offer": 120.0, "patience": null, "on_missing_quorum": "wait", "state": "committed", "wanted": 3, "quorum": 3, "deadline": null, "overdue": false, "reason": ""}','{"updates": 3, "samples": 6, "bytes_up": 872, "loss": null, "trainers": {"stem": 1, "body": 2, "head": 3}}',1000000.0,1000000.0);
INSERT INTO "rounds" VALUES('d3ef1096d11357e9',1,'collecting','{"number": 1, "seed": 0, "opened_at": 1000000.0, "lease": 3600.0, "offer": 120.0, "patience": null, "on_missing_quorum": "wait", "state": "collecting", "wanted": 3, "quorum": 3, "deadline": null, "overdue": false, "reason": ""}','{}',1000000.0,NULL);
CREATE TABLE seats (
	job VARCHAR(32) NOT NULL, 
	round INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	body JSON NOT NULL, 
	PRIMARY KEY (job, round, number), 
	FOREIGN KEY(job) REFERENCES jobs (id)
);
INSERT INTO "seats" VALUES('d3ef1096d11357e9',0,0,'{"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["3e23e8160039"]}');
INSERT INTO "seats" VALUES('d3ef1096d11357e9',0,1,'{"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["2e7d2c03a950"]}');
INSERT INTO "seats" VALUES('d3ef1096d11357e9',0,2,'{"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["ca978112ca1b"]}');
INSERT INTO "seats" VALUES('d3ef1096d11357e9',1,0,'{"number": 0, "member": {"device": "3e23e8160039", "boundary": "body", "trains": 2}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["3e23e8160039"]}');
INSERT INTO "seats" VALUES('d3ef1096d11357e9',1,1,'{"number": 1, "member": {"device": "2e7d2c03a950", "boundary": "head", "trains": 1}, "count": 1, "state": "leased", "until": 1003600.0, "holders": ["2e7d2c03a950"]}');
INSERT INTO "seats" VALUES('d3ef1096d11357e9',1,2,'{"number": 2, "member": {"device": "ca978112ca1b", "boundary": "stem", "trains": 3}, "count": 1, "state": "arrived", "until": 1003600.0, "holders": ["ca978112ca1b"]}');
CREATE TABLE updates (
	task VARCHAR(96) NOT NULL, 
	job VARCHAR(32) NOT NULL, 
	round INTEGER NOT NULL, 
	slot INTEGER NOT NULL, 
	device VARCHAR(32) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	bytes INTEGER NOT NULL, 
	samples INTEGER NOT NULL, 
	weight DOUBLE NOT NULL, 
	report JSON NOT NULL, 
	arrived_at DOUBLE NOT NULL, 
	PRIMARY KEY (task), 
	FOREIGN KEY(job) REFERENCES jobs (id), 
	FOREIGN KEY(device) REFERENCES devices (id)
);
INSERT INTO "updates" VALUES('d3ef1096d11357e9-0-2-1','d3ef1096d11357e9',0,2,'ca978112ca1b','c537d1319a1499ba8c2c584bcdbf3e1bb6ad44ec4bb6b6622515f69e7a49eb0d',404,1,1.0,'{"samples": 1}',1000000.0);
INSERT INTO "updates" VALUES('d3ef1096d11357e9-0-0-1','d3ef1096d11357e9',0,0,'3e23e8160039','a00b1685ff347ba9cd6c49aa43343379e91f73ccd6cf32dc3d4654ef87a6a246',244,2,2.0,'{"samples": 2}',1000000.0);
INSERT INTO "updates" VALUES('d3ef1096d11357e9-0-1-1','d3ef1096d11357e9',0,1,'2e7d2c03a950','967182977c24ef9efe7359a2b7cde4cf9cf53efdd4a8799457ae6255c5da97da',224,3,3.0,'{"samples": 3}',1000000.0);
INSERT INTO "updates" VALUES('d3ef1096d11357e9-1-2-1','d3ef1096d11357e9',1,2,'ca978112ca1b','09456d5c10d0cc8823171b63ef0bfec782813c982c5ceccf69b08ed91d7301c3',404,1,1.0,'{"samples": 1}',1000000.0);
CREATE INDEX ix_events_job ON events (job);
CREATE INDEX updates_of_round ON updates (job, round);
CREATE INDEX ix_metrics_job ON metrics (job);
COMMIT;
