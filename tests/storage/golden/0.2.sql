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
INSERT INTO "autotune_attempts" VALUES('9af8255f118549d2b9ed910071031420',1,1,'vm:21267:e726f54fd80f','finished',1.79577776357700443269e+09,0,'2026-11-27 11:08:23','2026-11-27 11:08:29','',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('fdf44dbbf395404cb64070d525e51e7d',2,1,'vm:21267:e726f54fd80f','finished',1.79577777347600507735e+09,1,'2026-11-27 11:08:29','2026-11-27 11:08:39','',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('e14994b779fc410f93b653e8608f1c0e',3,1,'vm:21267:e726f54fd80f','given_up',1.7957777792620129585e+09,0,'2026-11-27 11:08:39','2026-11-27 11:09:17','its worker has ended',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('103ed930af654347ab365f53210c71e0',3,2,'vm:22311:588e4e4e338a','finished',1.79577781754601359365e+09,0,'2026-11-27 11:09:17','2026-11-27 11:09:21','',NULL,NULL);
INSERT INTO "autotune_attempts" VALUES('4681c472567241cd84978824f67da32d',4,1,'vm:22311:588e4e4e338a','finished',1.79577782160799121857e+09,0,'2026-11-27 11:09:21','2026-11-27 11:09:21','',NULL,NULL);
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
INSERT INTO "autotune_confirmations" VALUES('ff8a76d9be8d4458a029560518afbfe1',1,1,'28d82dacc748','{"kind": "paired_speed", "config": {"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "partner": {"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "schedule": "in turn", "rounds": 6, "speed_ratio": 0.1509376046411432, "partner_tokens_per_second": 6616.076477734339, "failure": "", "seconds": 1.750928288999603}','2026-11-27 11:09:23');
INSERT INTO "autotune_confirmations" VALUES('30c05993385843bea5d1b41b0b9a75de',1,2,'28d82dacc748','{"kind": "paired_speed", "config": {"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "partner": {"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "schedule": "in turn", "rounds": 6, "speed_ratio": 0.13164662117925538, "partner_tokens_per_second": 8780.029220290397, "failure": "", "seconds": 1.9347414609997031}','2026-11-27 11:09:25');
INSERT INTO "autotune_confirmations" VALUES('94d22de77a434c7d82d36bfba7928659',1,3,'28d82dacc748','{"kind": "paired_speed", "config": {"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "partner": {"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}, "schedule": "in turn", "rounds": 6, "speed_ratio": 0.1907882846175677, "partner_tokens_per_second": 4325.395407278925, "failure": "", "seconds": 1.9062124000001859}','2026-11-27 11:09:27');
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
INSERT INTO "autotune_identity" VALUES(1,'8915894e901a41ad9e2bfaa87f89b72f');
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
INSERT INTO "autotune_predictions" VALUES(1,1,'b1c7ab8c2b78','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"device": "cpu", "fake_device": "cpu", "peak_memory_bytes": 1756624, "upper_bound_bytes": 1776521, "lower_bound_bytes": 1736727, "phase": "backward", "module": "GPT", "operator": "aten._log_softmax_backward_data", "bytes_by_category": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412, "gradients": 0, "gathered_weights": 0, "activations": 972292, "temporaries": 262148, "inputs": 4, "workspace": 0}, "parameters": 43168, "holders": [{"category": "optimizer_state", "module": "", "operator": "optimizer state", "count": 51, "size_bytes": 345412}, {"category": "activations", "module": "GPT", "operator": "aten._log_softmax", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten._log_softmax_backward_data", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten.nll_loss_backward", "count": 1, "size_bytes": 131072}, {"category": "activations", "module": "blocks.*.attention.query_key_value", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.mul", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.silu", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.gate", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.up", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention_norm", "operator": "aten.mul", "count": 4, "size_bytes": 65536}], "plan": null, "notes": [], "timeline": null, "flops_per_token": 233472.0, "bytes_accessed_per_token": 98860.53125, "devices": 1, "peak_memory_bytes_by_rank": [], "distinct_ranks": 1, "extrapolated_from": [], "checked_at": null, "check_error_bytes": null, "seconds": 3.4305641650003054}','');
INSERT INTO "autotune_predictions" VALUES(2,1,'28d82dacc748','{"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"device": "cpu", "fake_device": "cpu", "peak_memory_bytes": 836560, "upper_bound_bytes": 854617, "lower_bound_bytes": 818503, "phase": "backward", "module": "blocks.1.feed_forward.down", "operator": "aten.mm", "bytes_by_category": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412, "gradients": 172672, "gathered_weights": 0, "activations": 113028, "temporaries": 28676, "inputs": 4, "workspace": 0}, "parameters": 43168, "holders": [{"category": "optimizer_state", "module": "", "operator": "optimizer state", "count": 51, "size_bytes": 345412}, {"category": "gradients", "module": "embedding", "operator": "aten.embedding_dense_backward", "count": 1, "size_bytes": 32768}, {"category": "parameters", "module": "embedding", "operator": "weight", "count": 1, "size_bytes": 32768}, {"category": "gradients", "module": "head", "operator": "aten.mm", "count": 1, "size_bytes": 32768}, {"category": "parameters", "module": "head", "operator": "weight", "count": 1, "size_bytes": 32768}, {"category": "gradients", "module": "blocks.*.attention.query_key_value", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "parameters", "module": "blocks.*.attention.query_key_value", "operator": "weight", "count": 2, "size_bytes": 24576}, {"category": "gradients", "module": "blocks.*.feed_forward.down", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "temporaries", "module": "blocks.*.feed_forward.down", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "parameters", "module": "blocks.*.feed_forward.down", "operator": "weight", "count": 2, "size_bytes": 24576}, {"category": "gradients", "module": "blocks.*.feed_forward.gate", "operator": "aten.mm", "count": 2, "size_bytes": 24576}, {"category": "parameters", "module": "blocks.*.feed_forward.gate", "operator": "weight", "count": 2, "size_bytes": 24576}], "plan": null, "notes": [], "timeline": null, "flops_per_token": 282624.0, "bytes_accessed_per_token": 140030.75, "devices": 1, "peak_memory_bytes_by_rank": [], "distinct_ranks": 1, "extrapolated_from": [], "checked_at": null, "check_error_bytes": null, "seconds": 5.962872419000178}','');
INSERT INTO "autotune_predictions" VALUES(3,1,'8d3bd7d99e1f','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "sgd", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"device": "cpu", "fake_device": "cpu", "peak_memory_bytes": 1583884, "upper_bound_bytes": 1603436, "lower_bound_bytes": 1564332, "phase": "backward", "module": "GPT", "operator": "aten._log_softmax_backward_data", "bytes_by_category": {"parameters": 172672, "buffers": 4096, "optimizer_state": 172672, "gradients": 0, "gathered_weights": 0, "activations": 972292, "temporaries": 262148, "inputs": 4, "workspace": 0}, "parameters": 43168, "holders": [{"category": "optimizer_state", "module": "", "operator": "optimizer state", "count": 17, "size_bytes": 172672}, {"category": "activations", "module": "GPT", "operator": "aten._log_softmax", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten._log_softmax_backward_data", "count": 1, "size_bytes": 131072}, {"category": "temporaries", "module": "GPT", "operator": "aten.nll_loss_backward", "count": 1, "size_bytes": 131072}, {"category": "activations", "module": "blocks.*.attention.query_key_value", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.mul", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward", "operator": "aten.silu", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.gate", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*.feed_forward.up", "operator": "aten.mm", "count": 2, "size_bytes": 98304}, {"category": "activations", "module": "blocks.*", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention", "operator": "aten.add", "count": 4, "size_bytes": 65536}, {"category": "activations", "module": "blocks.*.attention_norm", "operator": "aten.mul", "count": 4, "size_bytes": 65536}], "plan": null, "notes": [], "timeline": null, "flops_per_token": 233472.0, "bytes_accessed_per_token": 86718.46875, "devices": 1, "peak_memory_bytes_by_rank": [], "distinct_ranks": 1, "extrapolated_from": [], "checked_at": null, "check_error_bytes": null, "seconds": 2.4274228099998254}','');
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
INSERT INTO "autotune_studies" VALUES(1,4,'golden','2026-11-27 11:08:22','{"model": "gpt", "model_config": null, "model_sha256": "", "pretrained": false, "model_source": null, "script": null, "script_arguments": [], "script_files": null, "script_files_after_apply": {}, "one_rank": false, "layers": 2, "width": 32, "heads": 2, "feed_forward_width": null, "vocab_size": 256, "dataset": "text.jsonl", "dataset_config": null, "dataset_split": "train", "held_out_split": null, "streaming": false, "text_column": null, "chat_column": null, "text_sha256": "21fec57a9d7fa81287757c529da98d5d76b7711007a59ca3578c1052f8bd19d7", "tokenizer": "bytes", "packing": "packed", "sequence_length": 32, "global_batch": 4, "devices_per_trial": 1, "steps": 8, "warmup_steps": 2, "evaluation_sequences": 4, "seed": 0, "learning_rates": {"adamw": 0.002, "adafactor": 0.03, "sgd": 1e+30, "adafactor-fixed-rate": 0.0002}, "schedule": "constant", "learning_rate_warmup_steps": 10, "gradient_clipping": null}','{"name": "space", "description": "Micro batches and optimizers, one of which diverges.", "techniques": {"optimizer": ["adamw", "sgd"], "micro_batch_size": "divisors", "checkpointing": ["none", "block"]}, "conditions": [], "defaults": {}, "configurations": [{"name": "gr\u00f6\u00dfte Ersparnis \u2713", "checkpointing": "block", "micro_batch_size": 1}, {"name": "diverges", "optimizer": "sgd"}], "workload": {}}','{"device": "cpu", "name": "AMD EPYC, 1 threads", "total_memory_bytes": 25276510208, "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "system": "Linux-6.18.44-fc-v657-x86_64-with-glibc2.36", "autotune": "0.2.1", "transformers": "5.23.0", "torchao": "0.18.0", "deepspeed": "0.19.8"}, "uuid": null, "is_known_to_nvml": false, "compute_capability": null, "shares_host_memory": false, "compute_mode": null, "context_bytes": null, "matrix_flops_per_second": {"fp32": 58056140919.69103}, "bandwidth_bytes_per_second": null, "others": "", "notes": []}','{}',4294967296,0,'ehvi',4,15);
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
INSERT INTO "autotune_trials" VALUES(1,1,0,'b1c7ab8c2b78','baseline','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "ok", "message": "", "peak_memory_bytes": 1756624, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": 1756624, "device_bytes": 1756624, "context_bytes": 0, "alloc_retries": 0, "peak_phase": "backward", "bytes_by_kind": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412}, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": 3293.0141398956202, "tokens_per_second_spread": 1706.9057503282897, "perplexity": 171.6993188097939, "perplexity_spread": null, "perplexity_source": {"kind": "measured", "seeds": 1, "failed_seeds": [], "trial": null, "step": null, "last_steps": null, "unused_evaluation": null, "over_random_weights": false}, "parity": "same", "parity_message": "at most, the gradient of block 0 is 3.6e-05 % off at step 1 and 1 % allowed", "bits_per_byte": 7.423740505459084, "final_loss": 5.237893104553223, "compile_seconds": null, "compile_cache": null, "startup_seconds": 0.3150318220000372, "device_startup_seconds": 0.013486278000073071, "seconds_by_part": {"startup": 0.3150318220000372, "compilation": 0.0, "evaluation": 0.14756125499980044, "training": 0.8613520120002249, "parity": 0.01860097799999494}, "communication_seconds": null, "communication_share": null, "model_flops_per_token": 233472.0, "recomputed_flops_per_token": 0.0, "reused_from": null}',2.25761938599998757126e+00,'2026-11-27 11:08:23','2026-11-27 11:08:29',3);
INSERT INTO "autotune_trials" VALUES(2,1,1,'28d82dacc748','größte Ersparnis ✓','{"precision": "fp32", "checkpointing": "block", "compile": "none", "memory_budget": 1.0, "optimizer": "adamw", "optimizer_fusion": "none", "micro_batch_size": 1, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "ok", "message": "", "peak_memory_bytes": 836560, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": 836560, "device_bytes": 836560, "context_bytes": 0, "alloc_retries": 0, "peak_phase": "backward", "bytes_by_kind": {"parameters": 172672, "buffers": 4096, "optimizer_state": 345412}, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": 888.6181720793643, "tokens_per_second_spread": 90.02041247027591, "perplexity": 171.6993188097939, "perplexity_spread": null, "perplexity_source": {"kind": "shared", "seeds": 1, "failed_seeds": [], "trial": {"number": 0, "study": null}, "step": null, "last_steps": null, "unused_evaluation": null, "over_random_weights": false}, "parity": "same", "parity_message": "at most, the loss of step 1 is 5.51698 for 5.51698, 0 % off and 0.01 % allowed", "bits_per_byte": 7.423740505459084, "final_loss": null, "compile_seconds": null, "compile_cache": null, "startup_seconds": 0.2789976450003451, "device_startup_seconds": 0.013315990999672067, "seconds_by_part": {"startup": 0.2789976450003451, "compilation": 0.0, "evaluation": 0.08869783699992695, "training": 2.693880294999417, "parity": 0.01765224600012516}, "communication_seconds": null, "communication_share": null, "model_flops_per_token": 233472.0, "recomputed_flops_per_token": 49152.0, "reused_from": null}',3.2059140530000149738e+00,'2026-11-27 11:08:29','2026-11-27 11:08:39',5);
INSERT INTO "autotune_trials" VALUES(3,1,2,'8d3bd7d99e1f','diverges','{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "sgd", "optimizer_fusion": "none", "micro_batch_size": 4, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "diverged", "message": "the loss became nan at step 2", "peak_memory_bytes": null, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": null, "device_bytes": null, "context_bytes": null, "alloc_retries": null, "peak_phase": null, "bytes_by_kind": null, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": null, "tokens_per_second_spread": null, "perplexity": null, "perplexity_spread": null, "perplexity_source": null, "parity": "not compared", "parity_message": "the plain training to compare with: the loss became nan at step 2", "bits_per_byte": null, "final_loss": null, "compile_seconds": null, "compile_cache": null, "startup_seconds": null, "device_startup_seconds": null, "seconds_by_part": null, "communication_seconds": null, "communication_share": null, "model_flops_per_token": null, "recomputed_flops_per_token": null, "reused_from": null}',1.26399175300002752919e+00,'2026-11-27 11:08:39','2026-11-27 11:09:21',10);
INSERT INTO "autotune_trials" VALUES(4,1,3,'8effa8f3d9bd',NULL,'{"precision": "fp32", "checkpointing": "none", "compile": "none", "memory_budget": 1.0, "optimizer": "sgd", "optimizer_fusion": "none", "micro_batch_size": 2, "allocator": "default", "attention": "auto", "loss": "full", "activation_offload": "none", "adapter": "none", "adapter_rank": 8, "adapter_targets": "all-linear", "base_weights": "trained", "sharding": "none", "sharding_group": 1, "tensor_parallel": 1, "offload": "none", "gradient_reduction": "fp32", "engine": "torch"}','{"outcome": "diverged", "message": "the loss became nan at step 2", "peak_memory_bytes": null, "devices": 1, "peak_memory_bytes_by_rank": [], "peak_reserved_bytes": null, "device_bytes": null, "context_bytes": null, "alloc_retries": null, "peak_phase": null, "bytes_by_kind": null, "peak_bytes_by_category": null, "requested_bytes": null, "tokens_per_second": null, "tokens_per_second_spread": null, "perplexity": null, "perplexity_spread": null, "perplexity_source": null, "parity": "not compared", "parity_message": "the plain training to compare with: the loss became nan at step 2", "bits_per_byte": null, "final_loss": null, "compile_seconds": null, "compile_cache": null, "startup_seconds": null, "device_startup_seconds": null, "seconds_by_part": null, "communication_seconds": null, "communication_share": null, "model_flops_per_token": null, "recomputed_flops_per_token": null, "reused_from": null}',2.74833670000134588917e-01,'2026-11-27 11:09:21','2026-11-27 11:09:21',12);
CREATE INDEX autotune_trials_by_revision ON autotune_trials (study_id, revision);
CREATE UNIQUE INDEX autotune_one_running_attempt ON autotune_attempts (trial_id) WHERE state = 'running';
CREATE INDEX autotune_searches_by_state ON autotune_searches (state);
CREATE INDEX autotune_searches_by_study ON autotune_searches (study);
DELETE FROM "sqlite_sequence";
COMMIT;
