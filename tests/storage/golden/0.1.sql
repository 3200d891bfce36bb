BEGIN TRANSACTION;
CREATE TABLE autotune_actions (
	id INTEGER NOT NULL, 
	at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	who VARCHAR(100) NOT NULL, 
	action VARCHAR(40) NOT NULL, 
	target VARCHAR(200) NOT NULL, 
	detail VARCHAR(1000) NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE autotune_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT autotune_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "autotune_alembic_version" VALUES('0006');
CREATE TABLE autotune_attempts (
	id VARCHAR(32) NOT NULL, 
	trial_id INTEGER NOT NULL, 
	ordinal INTEGER NOT NULL, 
	worker VARCHAR(200) NOT NULL, 
	state VARCHAR(12) NOT NULL, 
	lease_until FLOAT NOT NULL, 
	renewals INTEGER NOT NULL, 
	started_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	ended_at DATETIME, 
	cause VARCHAR(500) NOT NULL, 
	measurement JSON, 
	seconds FLOAT, 
	PRIMARY KEY (id), 
	UNIQUE (trial_id, ordinal), 
	FOREIGN KEY(trial_id) REFERENCES autotune_trials (id) ON DELETE CASCADE
);
INSERT INTO "autotune_attempts" VALUES('b37f8631826442a1b3bb1f518656882c',1,1,'vm:19811:5a0dcbc88d4e','finished',1.79577765691699147224e+09,0,'2026-11-27 11:06:36','2026-11-27 11:06:42','',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('23d09ca0585e4177a6179191fe33ee15',2,1,'vm:19811:5a0dcbc88d4e','finished',1.79577766685598397256e+09,1,'2026-11-27 11:06:42','2026-11-27 11:06:50','',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('3213633273bc49589ceaf9f28170ef65',3,1,'vm:19811:5a0dcbc88d4e','given_up',1.7957776708199939728e+09,0,'2026-11-27 11:06:50','2026-11-27 11:07:19','its worker has ended',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('3cde65467a8747358c0f5a3d5602b31e',3,2,'vm:21076:508925507725','finished',1.79577770000498962398e+09,0,'2026-11-27 11:07:20','2026-11-27 11:07:25','',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('b2b207b833eb4f5cae77d96be13192a0',4,1,'vm:21076:508925507725','finished',1.79577770534698438645e+09,0,'2026-11-27 11:07:25','2026-11-27 11:07:25','',NULL,NULL);
CREATE TABLE autotune_confirmations (
	id VARCHAR(32) NOT NULL, 
	study_id INTEGER NOT NULL, 
	ordinal INTEGER NOT NULL, 
	fingerprint VARCHAR(12) NOT NULL, 
	result JSON NOT NULL, 
	created_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (study_id, ordinal), 
	FOREIGN KEY(study_id) REFERENCES autotune_studies (id) ON DELETE CASCADE
);
INSERT INTO "autotune_confirmations" VALUES('3c98a34ee95b466dbb9a0abb1e15a265',1,1,'28d82dacc748','{"kind": "paired_speed", "config": {"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "partner": {"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "schedule": "in turn", "rounds": 6, "speed_ratio": 0.19407104513523593, "partner_tokens_per_second": 3374.1932486840487, "failure": "", "seconds": 2.6486491919999935}','2026-11-27 11:07:28');
INSERT INTO "autotune_confirmations" VALUES('d80d43de0cd9439f9bd372ee2818b22a',1,2,'28d82dacc748','{"kind": "paired_speed", "config": {"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "partner": {"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "schedule": "in turn", "rounds": 6, "speed_ratio": 0.12544279115076687, "partner_tokens_per_second": 7362.431089789034, "failure": "", "seconds": 2.1865372729998853}','2026-11-27 11:07:30');
INSERT INTO "autotune_confirmations" VALUES('fde6736e296f4761b740147f105a1d15',1,3,'28d82dacc748','{"kind": "paired_speed", "config": {"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "partner": {"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "schedule": "in turn", "rounds": 6, "speed_ratio": 0.15425407367788688, "partner_tokens_per_second": 4960.699246426776, "failure": "", "seconds": 2.850745429000199}','2026-11-27 11:07:33');
CREATE TABLE autotune_events (
	id BIGINT NOT NULL, 
	search_id INTEGER NOT NULL, 
	study VARCHAR(100) NOT NULL, 
	kind VARCHAR(20) NOT NULL, 
	data JSON NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE autotune_identity (
	id INTEGER NOT NULL, 
	identity VARCHAR(32) NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "autotune_identity" VALUES(1,'9243bc22e9b640ba858ec5e2426982b3');
CREATE TABLE autotune_predictions (
	id INTEGER NOT NULL, 
	study_id INTEGER NOT NULL, 
	fingerprint VARCHAR(12) NOT NULL, 
	config JSON NOT NULL, 
	prediction JSON, 
	refusal VARCHAR(500) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (study_id, fingerprint), 
	FOREIGN KEY(study_id) REFERENCES autotune_studies (id) ON DELETE CASCADE
);
INSERT INTO "autotune_predictions" VALUES(1,1,'b1c7ab8c2b78','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"device": "cpu", "fake_device": "cpu", "peak_memory_bytes": 1756624, "upper_bound_bytes": 1776521, "lower_bound_bytes": 1736727, "phase": "backward", "module": "GPT", "operator": "aten._log_softmax_backward_data", "bytes_by_category": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412, "gradients": 0, "gathered_weights": 0, "activations": 972292, "temporaries": 262148, "inputs": 4, "workspace": 0}, "parameters": 43168, "holders": [{"category": "optimizer_state", "module": "", "operator": "optimizer state", "count": 51, "size_bytes": 345412}, {"category": "activations", "module": "GPT", "operator": "aten._log_softmax", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten._log_softmax_backward_data", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten.nll_loss_backward", "count": 1, "size_bytes": 131072}, {"category": "activations", "module": "blocks.*.attention.query_key_value", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.mul", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.silu", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.gate", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.up", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention_norm", "operator": "aten.mul", "count": 4, "size_bytes": 65536}], "plan": null, "notes": [], "timeline": null, "flops_per_token": 233472.0, "bytes_accessed_per_token": 98860.53125, "devices": 1, "peak_memory_bytes_by_rank": [], "distinct_ranks": 1, "extrapolated_from": [], "checked_at": null, "check_error_bytes": null, "seconds": 4.067809300000135}','');
INSERT INTO "autotune_predictions" VALUES(2,1,'28d82dacc748','{"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"device": "cpu", "fake_device": "cpu", "peak_memory_bytes": 836560, "upper_bound_bytes": 854617, "lower_bound_bytes": 818503, "phase": "backward", "module": "blocks.1.feed_forward.down", "operator": "aten.mm", "bytes_by_category": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412, "gradients": 172672, "gathered_weights": 0, "activations": 113028, "temporaries": 28676, "inputs": 4, "workspace": 0}, "parameters": 43168, "holders": [{"category": "optimizer_state", "module": "", "operator": "optimizer state", "count": 51, "size_bytes": 345412}, {"category": "gradients", "module": "embedding", "operator": "aten.embedding_dense_backward", "count": 1, "size_bytes": 32768}, {"category": "parameters", "module": "embedding", "operator": "weight", "count": 1, "size_bytes": 32768}, {"category": "gradients", "module": "head", "operator": "aten.mm", "count": 1, "size_bytes": 32768}, {"category": "parameters", "module": "head", "operator": "weight", "count": 1, "size_bytes": 32768}, {"category": "gradients", "module": "blocks.*.attention.query_key_value", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "parameters", "module": "blocks.*.attention.query_key_value", "operator": "weight", "count": 2, "size_bytes": 24576}, {"category": "gradients", "module": "blocks.*.feed_forward.down", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "temporaries", "module": "blocks.*.feed_forward.down", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "parameters", "module": "blocks.*.feed_forward.down", "operator": "weight", "count": 2, "size_bytes": 24576}, {"category": "gradients", "module": "blocks.*.feed_forward.gate", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "parameters", "module": "blocks.*.feed_forward.gate", "operator": "weight", "count": 2, "size_bytes": 24576}], "plan": null, "notes": [], "timeline": null, "flops_per_token": 282624.0, "bytes_accessed_per_token": 140030.75, "devices": 1, "peak_memory_bytes_by_rank": [], "distinct_ranks": 1, "extrapolated_from": [], "checked_at": null, "check_error_bytes": null, "seconds": 5.084932708999986}','');
INSERT INTO "autotune_predictions" VALUES(3,1,'8d3bd7d99e1f','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "sgd", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"device": "cpu", "fake_device": "cpu", "peak_memory_bytes": 1583884, "upper_bound_bytes": 1603436, "lower_bound_bytes": 1564332, "phase": "backward", "module": "GPT", "operator": "aten._log_softmax_backward_data", "bytes_by_category": {"parameters": 172672, "buffers": 4096, "optimizer_state": 172672, "gradients": 0, "gathered_weights": 0, "activations": 972292, "temporaries": 262148, "inputs": 4, "workspace": 0}, "parameters": 43168, "holders": [{"category": "optimizer_state", "module": "", "operator": "optimizer state", "count": 17, "size_bytes": 172672}, {"category": "activations", "module": "GPT", "operator": "aten._log_softmax", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten._log_softmax_backward_data", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten.nll_loss_backward", "count": 1, "size_bytes": 131072}, {"category": "activations", "module": "blocks.*.attention.query_key_value", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.mul", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.silu", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.gate", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.up", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention_norm", "operator": "aten.mul", "count": 4, "size_bytes": 65536}], "plan": null, "notes": [], "timeline": null, "flops_per_token": 233472.0, "bytes_accessed_per_token": 86718.46875, "devices": 1, "peak_memory_bytes_by_rank": [], "distinct_ranks": 1, "extrapolated_from": [], "checked_at": null, "check_error_bytes": null, "seconds": 3.0749760359999527}','');
CREATE TABLE autotune_searches (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	study VARCHAR(100) NOT NULL, 
	state VARCHAR(12) NOT NULL, 
	request JSON NOT NULL, 
	priority INTEGER DEFAULT 0 NOT NULL, 
	device_group VARCHAR(100) DEFAULT '' NOT NULL, 
	submitted_by VARCHAR(100) NOT NULL, 
	submitted_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	not_before FLOAT DEFAULT 0 NOT NULL, 
	reason VARCHAR(2000) DEFAULT '' NOT NULL, 
	hint VARCHAR(2000) DEFAULT '' NOT NULL, 
	exit_code INTEGER, 
	"key" VARCHAR(310), 
	digest VARCHAR(64) DEFAULT '' NOT NULL, 
	run INTEGER DEFAULT 0 NOT NULL, 
	losses INTEGER DEFAULT 0 NOT NULL, 
	reported INTEGER DEFAULT 0 NOT NULL, 
	is_stopping BOOLEAN DEFAULT 0 NOT NULL, 
	is_announced BOOLEAN DEFAULT 0 NOT NULL, 
	host VARCHAR(200), 
	pid BIGINT, 
	process_started_at FLOAT, 
	lease_until FLOAT DEFAULT 0 NOT NULL, 
	progress JSON, 
	version VARCHAR(40) DEFAULT '' NOT NULL, 
	UNIQUE ("key")
);
CREATE TABLE autotune_server (
	id INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	holder VARCHAR(300) NOT NULL, 
	version VARCHAR(40) NOT NULL, 
	renewed_at FLOAT NOT NULL, 
	last_event BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "autotune_server" VALUES(1,0,'','',0.0,0);
CREATE TABLE autotune_studies (
	id INTEGER NOT NULL, 
	schema_version INTEGER NOT NULL, 
	name VARCHAR(100) NOT NULL, 
	created_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	workload JSON NOT NULL, 
	space JSON NOT NULL, 
	device JSON NOT NULL, 
	unavailable JSON NOT NULL, 
	cap_bytes BIGINT NOT NULL, 
	seed BIGINT NOT NULL, 
	sampler VARCHAR(20) NOT NULL, 
	trials_wanted INTEGER NOT NULL, revision INTEGER DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "autotune_studies" VALUES(1,4,'golden','2026-11-27 11:06:35','{"model": "gpt", "model_config": null, "model_sha256": "", "pretrained": false, "model_source": null, "script": null, "script_arguments": [], "script_files": null, "script_files_after_apply": {}, "one_rank": false, "layers": 2, "width": 32, "heads": 2, "feed_forward_width": null, "vocab_size": 256, "dataset": "text.jsonl", "dataset_config": null, "dataset_split": "train", "held_out_split": null, "streaming": false, "text_column": null, "chat_column": null, "text_sha256": "21fec57a9d7fa81287757c529da98d5d76b7711007a59ca3578c1052f8bd19d7", "tokenizer": "bytes", "packing": "packed", "sequence_length": 32, "global_batch": 4, "devices_per_trial": 1, "steps": 8, "warmup_steps": 2, "evaluation_sequences": 4, "seed": 0, "learning_rates": {"adamw": 0.002, "adafactor": 0.03, "sgd": 1e+30, "adafactor-fixed-rate": 0.0002}, "schedule": "constant", "learning_rate_warmup_steps": 10, "gradient_clipping": null}','{"name": "space", "description": "Micro batches and optimizers, one of which diverges.", "techniques": {"optimizer": ["adamw", "sgd"], "micro_batch_size": "divisors", "checkpointing": ["none", "block"]}, "conditions": [], "defaults": {}, "configurations": [{"name": "gr\u00f6\u00dfte Ersparnis \u2713", "checkpointing": "block", "micro_batch_size": 1}, {"name": "diverges", "optimizer": "sgd"}], "workload": {}}','{"device": "cpu", "name": "AMD EPYC, 1 threads", "total_memory_bytes": 25276510208, "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "system": "Linux-6.18.44-fc-v657-x86_64-with-glibc2.36", "autotune": "0.2.1", "transformers": "5.23.0", "torchao": "0.18.0", "deepspeed": "0.19.8"}, "uuid": null, "is_known_to_nvml": false, "compute_capability": null, "shares_host_memory": false, "compute_mode": null, "context_bytes": null, "matrix_flops_per_second": {"fp32": 65273567111.402084}, "bandwidth_bytes_per_second": 4865881040.650908, "others": "", "notes": []}','{}',4294967296,0,'ehvi',4,15);
CREATE TABLE autotune_tokens (
	id INTEGER NOT NULL, 
	name VARCHAR(100) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	read_only BOOLEAN NOT NULL, 
	created_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	revoked_at DATETIME, 
	PRIMARY KEY (id), 
	UNIQUE (name), 
	UNIQUE (digest)
);
CREATE TABLE autotune_trials (
	id INTEGER NOT NULL, 
	study_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	fingerprint VARCHAR(12) NOT NULL, 
	name VARCHAR(200), 
	config JSON NOT NULL, 
	measurement JSON, 
	seconds FLOAT, 
	started_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL, 
	finished_at DATETIME, revision INTEGER DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (study_id, number), 
	UNIQUE (study_id, fingerprint), 
	FOREIGN KEY(study_id) REFERENCES autotune_studies (id) ON DELETE CASCADE
);
INSERT INTO "autotune_trials" VALUES(1,1,0,'b1c7ab8c2b78','baseline','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "ok", "message": "", "peak_memory_bytes": 1756624, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": 1756624, "device_bytes": 1756624, "context_bytes": 0, "alloc_retries": 0, "peak_phase": "backward", "bytes_by_kind": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412}, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": 4858.352854694896, "tokens_per_second_spread": 1626.5096561661858, "perplexity": 171.6993188097939, "perplexity_spread": null, "perplexity_source": {"kind": "measured", "seeds": 1, "failed_seeds": [], "trial": null, "step": null, "last_steps": null, "unused_evaluation": null, "over_random_weights": false}, "parity": "same", "parity_message": "at most, the gradient of block 0 is 3.6e-05 % off at step 1 and 1 % allowed", "bits_per_byte": 7.423740505459084, "final_loss": 5.237893104553223, "compile_seconds": null, "compile_cache": null, "startup_seconds": 0.16948985499993796, "device_startup_seconds": 0.0008722479997231858, "seconds_by_part": {"startup": 0.16948985499993796, "compilation": 0.0, "evaluation": 0.08517790599989894, "training": 0.6305485719994977, "parity": 0.024343520000002172}, "communication_seconds": null, "communication_share": null, "model_flops_per_token": 233472.0, "recomputed_flops_per_token": 0.0, "reused_from": null}',1.4059272529998452228e+00,'2026-11-27 11:06:36','2026-11-27 11:06:42',3);
INSERT INTO "autotune_trials" VALUES(2,1,1,'28d82dacc748','größte Ersparnis ✓','{"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "ok", "message": "", "peak_memory_bytes": 836560, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": 836560, "device_bytes": 836560, "context_bytes": 0, "alloc_retries": 0, "peak_phase": "backward", "bytes_by_kind": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412}, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": 895.9028897498775, "tokens_per_second_spread": 131.7077544755059, "perplexity": 171.6993188097939, "perplexity_spread": null, "perplexity_source": {"kind": "shared", "seeds": 1, "failed_seeds": [], "trial": {"number": 0, "study": null}, "step": null, "last_steps": null, "unused_evaluation": null, "over_random_weights": false}, "parity": "same", "parity_message": "at most, the loss of step 1 is 5.51698 for 5.51698, 0 % off and 0.01 % allowed", "bits_per_byte": 7.423740505459084, "final_loss": null, "compile_seconds": null, "compile_cache": null, "startup_seconds": 0.2248656579999988, "device_startup_seconds": 0.013018004000059591, "seconds_by_part": {"startup": 0.2248656579999988, "compilation": 0.0, "evaluation": 0.08384260700040613, "training": 2.374276139000358, "parity": 0.03393159899997045}, "communication_seconds": null, "communication_share": null, "model_flops_per_token": 233472.0, "recomputed_flops_per_token": 49152.0, "reused_from": null}',2.81599577399993,'2026-11-27 11:06:42','2026-11-27 11:06:50',5);
INSERT INTO "autotune_trials" VALUES(3,1,2,'8d3bd7d99e1f','diverges','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "sgd", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "diverged", "message": "the loss became nan at step 2", "peak_memory_bytes": null, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": null, "device_bytes": null, "context_bytes": null, "alloc_retries": null, "peak_phase": null, "bytes_by_kind": null, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": null, "tokens_per_second_spread": null, "perplexity": null, "perplexity_spread": null, "perplexity_source": null, "parity": "not compared", "parity_message": "the plain training to compare with: the loss became nan at step 2", "bits_per_byte": null, "final_loss": null, "compile_seconds": null, "compile_cache": null, "startup_seconds": null, "device_startup_seconds": null, "seconds_by_part": null, "communication_seconds": null, "communication_share": null, "model_flops_per_token": null, "recomputed_flops_per_token": null, "reused_from": null}',1.81295262599996931385e+00,'2026-11-27 11:06:50','2026-11-27 11:07:25',10);
INSERT INTO "autotune_trials" VALUES(4,1,3,'5c1e7647db83',NULL,'{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "sgd", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "diverged", "message": "the loss became nan at step 2", "peak_memory_bytes": null, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": null, "device_bytes": null, "context_bytes": null, "alloc_retries": null, "peak_phase": null, "bytes_by_kind": null, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": null, "tokens_per_second_spread": null, "perplexity": null, "perplexity_spread": null, "perplexity_source": null, "parity": "not compared", "parity_message": "the plain training to compare with: the loss became nan at step 2", "bits_per_byte": null, "final_loss": null, "compile_seconds": null, "compile_cache": null, "startup_seconds": null, "device_startup_seconds": null, "seconds_by_part": null, "communication_seconds": null, "communication_share": null, "model_flops_per_token": null, "recomputed_flops_per_token": null, "reused_from": null}',6.15196632999868597835e-01,'2026-11-27 11:07:25','2026-11-27 11:07:25',12);
CREATE INDEX autotune_trials_by_revision ON autotune_trials (study_id, revision);
CREATE UNIQUE INDEX autotune_one_running_attempt ON autotune_attempts (trial_id) WHERE state = 'running';
CREATE INDEX autotune_searches_by_state ON autotune_searches (state);
CREATE INDEX autotune_searches_by_study ON autotune_searches (study);
DELETE FROM "sqlite_sequence";
COMMIT;
