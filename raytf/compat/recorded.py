"""Signatures as they are in the versions that raytf is tested with; written by `python -m raytf.compat --record`."""

# ruff: noqa: E501

SIGNATURES: dict[str, tuple[str, ...]] = {
    "keras.src.api_export:get_name_from_symbol": ("(symbol)",),
    "keras.src.backend.common.global_state:get_global_attribute": ("(name, default=, set_to_default=)",),
    "keras.src.backend.tensorflow.core:Variable._direct_assign": ("(self, value)",),
    "keras.src.backend.tensorflow.core:Variable._initialize": ("(self, value)",),
    "keras.src.backend.tensorflow.core:Variable._initialize_with_initializer": ("(self, initializer)",),
    "keras.src.backend.tensorflow.nn:_compute_moments_sync": ("(x, axes, keepdims)",),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer": ("(*args, **kwargs)",),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients": ("(self, grads_and_vars)",),
    "keras.src.backend.tensorflow.trainer:TFEpochIterator": ("(distribute_strategy=, *args, **kwargs)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._autoconvert_optionals": ("(self, step_func)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._get_metrics_result_or_logs": ("(self, logs)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._make_function": ("(self, step_function)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._maybe_symbolic_build": ("(self, iterator=, data_batch=)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.evaluate": (
        "(self, x=, y=, batch_size=, verbose=, sample_weight=, steps=, callbacks=, return_dict=, **kwargs)",
    ),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit": (
        "(self, x=, y=, batch_size=, epochs=, verbose=, callbacks=, validation_split=, validation_data=, shuffle=, class_weight=, sample_weight=, initial_epoch=, steps_per_epoch=, validation_steps=, validation_batch_size=, validation_freq=)",
    ),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.make_predict_function": ("(self, force=)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict": (
        "(self, x, batch_size=, verbose=, steps=, callbacks=)",
    ),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict_on_batch": ("(self, x)",),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.test_on_batch": (
        "(self, x, y=, sample_weight=, return_dict=)",
    ),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.train_on_batch": (
        "(self, x, y=, sample_weight=, class_weight=, return_dict=)",
    ),
    "keras.src.backend:compute_output_spec": ("(fn, *args, **kwargs)",),
    "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_begin": ("(self, logs=)",),
    "keras.src.layers.layer:Layer._flatten_layers": ("(self, include_self=, recursive=)",),
    "keras.src.losses.loss:Loss.__call__": ("(self, y_true, y_pred, sample_weight=)",),
    "keras.src.losses.loss:reduce_weighted_values": ("(values, sample_weight=, mask=, reduction=, dtype=)",),
    "keras.src.losses.loss:scale_loss_for_distribution": ("(value)",),
    "keras.src.losses.loss:unscale_loss_for_distribution": ("(value)",),
    "keras.src.losses.losses:LossFunctionWrapper": ("(fn, reduction=, name=, dtype=, **kwargs)",),
    "keras.src.metrics.reduction_metrics:Mean.update_state": ("(self, values, sample_weight=)",),
    "keras.src.models.functional:Functional": ("(*args, **kwargs)",),
    "keras.src.ops.function:make_node_key": ("(op, node_index)",),
    "keras.src.ops.node:KerasHistory": ("(operation, node_index, tensor_index)",),
    "keras.src.optimizers.base_optimizer:BaseOptimizer": (
        "(learning_rate, weight_decay=, clipnorm=, clipvalue=, global_clipnorm=, use_ema=, ema_momentum=, ema_overwrite_frequency=, loss_scale_factor=, gradient_accumulation_steps=, name=, **kwargs)",
    ),
    "keras.src.optimizers.base_optimizer:BaseOptimizer._get_variable_index": ("(self, variable)",),
    "keras.src.optimizers.base_optimizer:BaseOptimizer._use_weight_decay": ("(self, variable)",),
    "keras.src.optimizers.base_optimizer:BaseOptimizer._var_key": ("(self, variable)",),
    "keras.src.optimizers.base_optimizer:BaseOptimizer.apply": ("(self, grads, trainable_variables=)",),
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._common_apply": (
        "(self, grads, trainable_variables=)",
    ),
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._tf_apply": ("(self, grads, trainable_variables=)",),
    "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply": ("(self, grads, trainable_variables=)",),
    "keras.src.optimizers.sgd:SGD.update_step": ("(self, gradient, variable, learning_rate)",),
    "keras.src.random.seed_generator:SeedGenerator": ("(seed=, name=, **kwargs)",),
    "keras.src.random.seed_generator:SeedGenerator.next": ("(self, ordered=)",),
    "keras.src.random.seed_generator:global_seed_generator": ("()",),
    "keras.src.random.seed_generator:make_default_seed": ("()",),
    "keras.src.saving.saving_lib:H5IOStore": ("(path_or_io, archive=, mode=)",),
    "keras.src.saving.saving_lib:_save_state": (
        "(saveable, weights_store, assets_store, inner_path, visited_saveables)",
    ),
    "keras.src.saving.saving_lib:_serialize_model_as_json": ("(model)",),
    "keras.src.trainers.compile_utils:CompileLoss.build": ("(self, y_true, y_pred)",),
    "keras.src.trainers.epoch_iterator:EpochIterator": (
        "(x, y=, sample_weight=, batch_size=, steps_per_epoch=, shuffle=, class_weight=, steps_per_execution=)",
    ),
    "keras.src.trainers.epoch_iterator:EpochIterator._enumerate_iterator": ("(self)",),
    "keras.src.trainers.epoch_iterator:EpochIterator.reset": ("(self)",),
    "keras.src.trainers.trainer:Trainer._assert_compile_called": ("(self, method_name=)",),
    "keras.src.trainers.trainer:Trainer._compute_loss": ("(self, x=, y=, y_pred=, sample_weight=, training=)",),
    "keras.src.trainers.trainer:Trainer._flatten_metrics_in_order": ("(self, logs)",),
    "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs": ("(self, logs)",),
    "keras.src.trainers.trainer:Trainer._symbolic_build": ("(self, iterator=, data_batch=)",),
    "keras.src.trainers.trainer:Trainer.fit": (
        "(self, x=, y=, batch_size=, epochs=, verbose=, callbacks=, validation_split=, validation_data=, shuffle=, class_weight=, sample_weight=, initial_epoch=, steps_per_epoch=, validation_steps=, validation_batch_size=, validation_freq=)",
    ),
    "keras.src.utils.backend_utils:DynamicBackend": ("(backend=)",),
    "keras.src.utils.python_utils:is_default": ("(method)",),
    "keras.src.utils.python_utils:pythonify_logs": ("(logs)",),
    "keras.src.utils.tracking:TrackedOrderedDict": ("(values=, tracker=)",),
    "ray._private.authentication.authentication_token_setup:AuthenticationTokenLoader": ("()",),
    "ray._private.authentication.authentication_utils:is_token_auth_enabled": ("()",),
    "ray._private.grpc_utils:init_grpc_channel": ("(address, options=, asynchronous=, credentials=)",),
    "ray._private.node:Node.is_head": ("(self)",),
    "ray._private.ray_logging:WorkerStandardStreamDispatcher": ("()",),
    "ray._private.services:canonicalize_bootstrap_address": ("(addr, temp_dir=)",),
    "ray._private.state:GlobalState._connect_and_get_accessor": ("(self)",),
    "ray._private.state:GlobalState.get_draining_nodes": ("(self)",),
    "ray._private.state:GlobalState.get_max_resources_from_cluster_config": ("(self)",),
    "ray._private.state:actors": ("(actor_id=, job_id=, actor_state_name=)",),
    "ray._private.state:available_resources_per_node": ("()",),
    "ray._private.worker:print_to_stdstream": ("(data, ignore_prefix)",),
    "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator:get_or_create_autoscaling_coordinator": (
        "()",
    ),
    "ray.data._internal.compute:TaskPoolStrategy": ("(size=)",),
    "ray.data._internal.datasource_v2.common.listing_utils:_build_pruners": (
        "(file_extensions, partition_filter, partition_pruner=)",
    ),
    "ray.data._internal.datasource_v2.interfaces.file_manifest:FileManifest": ("(block)",),
    "ray.data._internal.datasource_v2.interfaces.scanner:Scanner": ("()",),
    "ray.data._internal.datasource_v2.listing.file_manifest:FileManifest": ("(block)",),
    "ray.data._internal.datasource_v2.listing.listing_utils:_build_pruners": ("(file_extensions, partition_filter)",),
    "ray.data._internal.datasource_v2.scanners.scanner:Scanner": ("()",),
    "ray.data._internal.execution.interfaces.ref_bundle:BlockEntry": ("(ref, metadata)",),
    "ray.data._internal.execution.interfaces.ref_bundle:BlockSlice": ("(start_offset, end_offset)",),
    "ray.data._internal.execution.interfaces.ref_bundle:RefBundle": (
        "(blocks, schema, owns_blocks, slices=, output_split_idx=, _cached_object_meta=, _cached_preferred_locations=)",
    ),
    "ray.data._internal.execution.operators.map_operator:MapOperator": (
        "(map_transformer, input_op, data_context, name, target_max_block_size_override, min_rows_per_bundle, ref_bundler, supports_fusion, map_task_kwargs, ray_remote_args_fn, ray_remote_args, on_start=, default_logical_memory_enabled=)",
    ),
    "ray.data._internal.logical.interfaces.logical_operator:LogicalOperator._apply_transform": ("(self, transform)",),
    "ray.data._internal.logical.interfaces:LogicalPlan": ("(dag, context)",),
    "ray.data._internal.logical.interfaces:SourceOperator": ("()",),
    "ray.data._internal.logical.operators:AbstractFrom": ("(input_blocks, input_metadata)",),
    "ray.data._internal.logical.operators:AbstractMap": (
        "(name=, input_dependencies=, *, can_modify_num_rows, min_rows_per_bundled_input=, ray_remote_args=, ray_remote_args_fn=, compute=)",
    ),
    "ray.data._internal.logical.operators:InputData": ("(input_data)",),
    "ray.data._internal.logical.operators:ListFiles": (
        "(paths, file_indexer, filesystem, source_paths, file_partitioner=, file_extensions=, partition_filter=, shuffle_config_factory=, predicate=, projected_columns=, limit=, partition_pruner=)",
        "(paths, file_indexer, filesystem, source_paths, file_partitioner=, file_extensions=, partition_filter=, shuffle_config_factory=)",
        "(paths, file_indexer, filesystem, source_paths, file_partitioner=, file_extensions=, partition_filter=, shuffle_config_factory=, predicate=, projected_columns=, limit=)",
    ),
    "ray.data._internal.logical.operators:MapBatches": (
        "(fn, fn_args=, fn_kwargs=, fn_constructor_args=, fn_constructor_kwargs=, ray_remote_args_fn=, can_modify_num_rows=, batch_size=, batch_format=, zero_copy_batch=, min_rows_per_bundled_input=, compute=, ray_remote_args=, per_block_limit=, *, input_dependencies)",
    ),
    "ray.data._internal.logical.operators:Read": (
        "(datasource, datasource_or_legacy_reader, parallelism, num_outputs=, ray_remote_args=, compute=, detected_parallelism=, per_block_limit=)",
    ),
    "ray.data._internal.logical.operators:ReadFiles": (
        "(datasource_name, scanner, schema, parallelism, ray_remote_args=, compute=, block_udf=, num_outputs=, *, input_dependencies)",
    ),
    "ray.data._internal.logical.optimizers:LogicalOptimizer": ("()",),
    "ray.data._internal.logical.optimizers:get_execution_plan": ("(logical_plan)",),
    "ray.data._internal.pandas_block:PandasBlockSchema": ("(names, types)",),
    "ray.data._internal.stats:DatasetStats": ("(*, metadata, parent, base_name=)",),
    "ray.data.dataset:Dataset._execute_to_iterator": ("(*args, **kwargs)",),
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._file_sizes": ("(self)",),
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._paths": ("(self)",),
    "ray.experimental.internal_kv:_internal_kv_del": ("(key, *, del_by_prefix=, namespace=)",),
    "ray.experimental.internal_kv:_internal_kv_get": ("(key, *, namespace=)",),
    "ray.experimental.internal_kv:_internal_kv_list": ("(prefix, *, namespace=)",),
    "ray.experimental.internal_kv:_internal_kv_put": ("(key, value, overwrite=, *, namespace=)",),
    "ray.train._internal.data_config:DataConfig._get_user_execution_options": ("(self, dataset_name)",),
    "ray.train._internal.data_config:DataConfig._resolve_execution_options": ("(self, dataset_name)",),
    "ray.train._internal.storage:get_fs_and_path": ("(storage_path, storage_filesystem=)",),
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleaner": (
        "(controller_actor_id, check_interval_s, get_actor_timeout_s, stop_timeout)",
    ),
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback": (
        "(check_interval_s=, get_actor_timeout_s=, stop_timeout=)",
    ),
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback.after_controller_start": (
        "(self, train_run_context)",
    ),
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback.after_worker_group_abort": (
        "(self, worker_group_context)",
    ),
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback.after_worker_group_start": (
        "(self, worker_group)",
    ),
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback.before_worker_group_shutdown": (
        "(self, worker_group)",
    ),
    "ray.train.v2._internal.callbacks.preemption_callback:PreemptionCallback": ("()",),
    "ray.train.v2._internal.callbacks.preemption_callback:PreemptionCallback._stop_watcher": ("(self)",),
    "ray.train.v2._internal.callbacks.preemption_callback:PreemptionCallback.after_worker_group_start": (
        "(self, worker_group)",
    ),
    "ray.train.v2._internal.callbacks.state_manager:StateManagerCallback": ("(datasets)",),
    "ray.train.v2._internal.callbacks:DatasetsCallback": ("(train_run_context, datasets)",),
    "ray.train.v2._internal.constants:get_env_vars_to_propagate": ("()",),
    "ray.train.v2._internal.execution.callback:WorkerGroupCallback": ("()",),
    "ray.train.v2._internal.execution.callback:WorkerGroupCallback.after_worker_group_poll_status": (
        "(self, worker_group_status)",
    ),
    "ray.train.v2._internal.execution.callback:WorkerGroupCallback.before_init_train_context": ("(self, workers)",),
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager": (
        "(checkpoint_config, storage_context)",
    ),
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._notify": ("(self)",),
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._write_state_to_storage": (
        "(self)",
    ),
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:_CheckpointManagerState": (
        "(*, ray_version=, checkpoint_results, checkpoint_report_indices, latest_checkpoint_result=, pending_training_results, pending_validation_specs, current_report_index, validated_checkpoint_dir_names, timed_out_validation_checkpoint_dir_names, failed_validation_checkpoint_dir_names)",
    ),
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:_TrainingResultState": (
        "(*, version=, checkpoint_dir_name, metrics)",
    ),
    "ray.train.v2._internal.execution.context:TrainContext": (
        "(train_run_context, distributed_context, execution_context, storage_context, preemption_context, controller_actor, dataset_shard_provider, has_validation_fn=, checkpoint=, current_report_index=, report_call_index=, collective_seq=, report_order_condition=, checkpoint_upload_threadpool=)",
        "(train_run_context, distributed_context, execution_context, storage_context, preemption_context, controller_actor, dataset_shard_provider, has_validation_fn=, checkpoint=, current_report_index=, report_call_index=, report_order_condition=, checkpoint_upload_threadpool=)",
    ),
    "ray.train.v2._internal.execution.context:TrainContext._wait_then_report": (
        "(self, training_report, report_call_index)",
    ),
    "ray.train.v2._internal.execution.context:get_train_context": ("()",),
    "ray.train.v2._internal.execution.context:is_managed_checkpoint": ("(storage_context, checkpoint)",),
    "ray.train.v2._internal.execution.controller.controller:TrainController._poll_workers": ("(self)",),
    "ray.train.v2._internal.execution.controller.controller:TrainController._shutdown_worker_group": ("(self)",),
    "ray.train.v2._internal.execution.controller.controller:TrainController.get_result": ("(self)",),
    "ray.train.v2._internal.execution.controller.placement_group_cleaner:is_actor_alive": ("(actor_id, timeout)",),
    "ray.train.v2._internal.execution.controller.state:ShuttingDownState": ("(next_state)",),
    "ray.train.v2._internal.execution.controller:TrainController": (
        "(train_fn_ref, train_run_context, scaling_policy, failure_policy, callbacks=, validation_config=)",
    ),
    "ray.train.v2._internal.execution.preemption:PreemptionInfo": ("(deadline_ms, preempted_node_to_ranks)",),
    "ray.train.v2._internal.execution.preemption:PreemptionWatcher": (
        "(node_to_ranks, poll_interval_s=, worker_actors_by_rank=)",
    ),
    "ray.train.v2._internal.execution.preemption:PreemptionWatcher._on_drain_change": ("(self, drained)",),
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy._count_possible_workers": (
        "(self, reserved_resources)",
        "(self, allocated_resources)",
    ),
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy.make_decision_for_non_running_worker_group": (
        "(self)",
    ),
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy.make_decision_for_running_worker_group": (
        "(self, worker_group_state, worker_group_status)",
    ),
    "ray.train.v2._internal.execution.scaling_policy:ElasticScalingPolicy": ("(scaling_config)",),
    "ray.train.v2._internal.execution.scaling_policy:NoopDecision": ("()",),
    "ray.train.v2._internal.execution.storage:StorageContext": (
        "(storage_path, experiment_dir_name, storage_filesystem=, read_only=)",
    ),
    "ray.train.v2._internal.execution.storage:get_fs_and_path": ("(storage_path, storage_filesystem=)",),
    "ray.train.v2._internal.execution.train_fn_utils:LocalTrainFnUtils": (
        "(experiment_name, dataset_shards=, world_size=, world_rank=, local_rank=, local_world_size=, node_rank=)",
    ),
    "ray.train.v2._internal.execution.train_fn_utils:TrainFnUtils": ("()",),
    "ray.train.v2._internal.execution.train_fn_utils:get_train_fn_utils": ("()",),
    "ray.train.v2._internal.execution.train_fn_utils:set_train_fn_utils": ("(train_fn_utils)",),
    "ray.train.v2._internal.execution.training_report:_TrainingReport": ("(checkpoint, metrics, validation)",),
    "ray.train.v2._internal.execution.worker_group.placement_group_handle:DefaultPlacementGroupHandle": ("(pg)",),
    "ray.train.v2._internal.execution.worker_group.placement_group_handle:PlacementGroupHandle": ("()",),
    "ray.train.v2._internal.execution.worker_group.poll:WorkerStatus": (
        "(running, error=, training_report=, return_value=, preemption_info=)",
    ),
    "ray.train.v2._internal.execution.worker_group.thread_runner:ThreadRunner.get_error": ("(self)",),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._clear_state": ("(self)",),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._create_placement_group": (
        "(self, scaling_config, worker_group_context)",
    ),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._create_workers": (
        "(self, num_workers, placement_group, resources_per_worker, placement_group_bundle_indices=, starting_world_rank=, world_size=, replica_group_size=)",
    ),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._get_worker_runtime_env": (
        "(custom_runtime_env)",
    ),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._init_train_context": (
        "(self, workers, sync_actor)",
    ),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._poll_workers_and_collect_errors": (
        "(self, timeout)",
    ),
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._start": ("(self)",),
    "ray.train.v2._internal.execution.worker_group:RayTrainWorker": ("()",),
    "ray.train.v2._internal.execution.worker_group:Worker": (
        "(actor, metadata, resources, distributed_context=, log_file_path=, placement_group_bundle_index=)",
    ),
    "ray.train.v2._internal.execution.worker_group:WorkerGroup": (
        "(train_run_context, worker_group_context, callbacks=)",
    ),
    "ray.train.v2._internal.state.state_actor:TrainStateActor": (
        "(enable_state_actor_reconciliation=, reconciliation_interval_s=, get_actor_timeout_s=, controllers_to_poll_per_iteration=)",
    ),
    "ray.train.v2._internal.state.state_actor:is_actor_alive": ("(actor_id, timeout)",),
    "ray.train.v2._internal.util:construct_train_func": ("(train_func, config, train_func_context, fn_arg_name=)",),
    "ray.train.v2._internal.util:construct_user_exception_with_traceback": ("(e, exclude_frames=)",),
    "ray.train.v2._internal.util:time_monotonic": ("()",),
    "ray.train.v2.api.config:ScalingConfig._label_selector_per_worker": ("(self, num_workers)",),
    "ray.train.v2.api.context:LocalTrainContext": (
        "(experiment_name, world_size=, world_rank=, local_rank=, local_world_size=, node_rank=)",
    ),
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer": (
        "(train_loop_per_worker, *, train_loop_config=, backend_config=, scaling_config=, run_config=, datasets=, dataset_config=, resume_from_checkpoint=, metadata=, validation_config=)",
    ),
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._create_default_callbacks": ("(self)",),
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._initialize_and_run_controller": (
        "(self, **controller_init_kwargs)",
    ),
    "ray.train.v2.api.reported_checkpoint:ReportedCheckpoint": ("(checkpoint, metrics, status)",),
    "ray.train.v2.api.result:Result._from_checkpoint_manager": ("(checkpoint_manager, storage_context, error=)",),
    "ray.train.v2.api.validation_config:ValidationConfig": ("(fn, task_config=, ray_remote_kwargs=)",),
    "ray.tune.schedulers.hyperband:HyperBandScheduler._process_bracket": ("(self, tune_controller, bracket)",),
    "tensorflow.python.autograph.pyct.loader:load_source": ("(source, delete_on_exit)",),
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._functions": ("(self)",),
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs": ("(self)",),
    "tensorflow.python.data.ops.iterator_ops:OwnedIterator": ("(dataset=, components=, element_spec=)",),
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended": (
        "(container_strategy, cluster_resolver, communication_options, devices=)",
    ),
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._get_variable_creator_initial_value": (
        "(self, replica_id, device, primary_var, **kwargs)",
    ),
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._in_multi_worker_mode": (
        "(self)",
    ),
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._initialize_multi_worker": (
        "(self, cluster_resolver)",
    ),
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce": (
        "(devices, group_size, options, collective_keys=, canonicalize_devices=)",
    ),
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher": (
        "(group_key, group_size, collective_keys, device, options)",
    ),
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher.all_gather": (
        "(self, input_tensor, axis, options=)",
    ),
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher.all_reduce_indexed_slices": (
        "(self, input_slices, options=)",
    ),
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher.batch_all_reduce": (
        "(self, input_tensor_packs, options=)",
    ),
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher.can_order_nccl": ("(self)",),
    "tensorflow.python.distribute.distribute_lib:ReplicaContext.all_reduce": ("(self, reduce_op, value, options=)",),
    "tensorflow.python.distribute.distribute_lib:ReplicaContextBase._merge_call": ("(self, merge_fn, args, kwargs)",),
    "tensorflow.python.distribute.mirrored_run:_MirroredReplicaContext._merge_call": ("(self, fn, args, kwargs)",),
    "tensorflow.python.distribute.ps_values:AggregatingVariable": ("(*args, **kwargs)",),
    "tensorflow.python.distribute.values:DistributedVariable": ("(*args, **kwargs)",),
    "tensorflow.python.eager.backprop:GradientTape.gradient": (
        "(self, target, sources, output_gradients=, unconnected_gradients=)",
    ),
    "tensorflow.python.eager.backprop:GradientTape.jacobian": (
        "(self, target, sources, unconnected_gradients=, parallel_iterations=, experimental_use_pfor=)",
    ),
    "tensorflow.python.eager.context:Context": ("(config=, device_policy=, execution_mode=, server_def=)",),
    "tensorflow.python.eager.context:Context._initialize_physical_devices": ("(self, reinitialize=)",),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function": (
        "(python_function, name, input_signature=, autograph=, jit_compile=, reduce_retracing=, experimental_implements=, experimental_autograph_options=, experimental_attributes=)",
    ),
    "tensorflow.python.ops.script_ops:FuncRegistry": ("()",),
    "tensorflow.python.ops.script_ops:FuncRegistry.__call__": ("(self, token, device, args)",),
    "tensorflow.python.ops.script_ops:FuncRegistry.insert": ("(self, func)",),
    "tensorflow.python.ops.script_ops:_py_funcs": ("(token, device, args)",),
    "tensorflow.python.trackable.base:CheckpointInitialValue": ("(checkpoint_position, shape=, shard_info=)",),
}
