//! `hotpin serve`: an OpenAI-compatible HTTP server.

use super::common::{self, ControlArgs, EngineArgs, Usage};
use crate::engine::EngineOptions;
use crate::engine::chat::Chat;
use crate::model::ModelMap;
use crate::plant::{Rig, RigOptions};
use crate::server::{App, Http, Key, Limits, ModelInfo, Phase, Ready, Scheduler};
use anyhow::{Context, Result};
use axum::http::HeaderValue;
use clap::Args;
use hotpin_controllers::PolicyKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// The model, a GGUF file (the first one if it is split)
    #[arg(env = "HOTPIN_MODEL")]
    model: PathBuf,
    /// Address to listen on; any but this machine's own needs --api-key
    #[arg(long, env = "HOTPIN_HOST", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "HOTPIN_PORT", default_value_t = 8080)]
    port: u16,
    /// Key that clients must send; controls are closed without one
    #[arg(
        long,
        env = "HOTPIN_API_KEY",
        value_name = "KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    /// The same from the first line of a file
    #[arg(
        long,
        env = "HOTPIN_API_KEY_FILE",
        value_name = "FILE",
        conflicts_with = "api_key"
    )]
    api_key_file: Option<PathBuf>,
    /// Name that requests give the model [default: the file's name]
    #[arg(long, env = "HOTPIN_ALIAS", value_name = "NAME")]
    alias: Option<String>,
    /// Requests that are decoded together; each has a context of -c tokens
    #[arg(long, env = "HOTPIN_PARALLEL", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    parallel: u32,
    /// Requests that may wait; more are refused with 429
    #[arg(long, env = "HOTPIN_QUEUE", default_value_t = Limits::default().queue)]
    queue: usize,
    /// Most connections at once
    #[arg(long, env = "HOTPIN_CONNECTIONS", default_value_t = Limits::default().connections)]
    connections: usize,
    /// Longest body of a request
    #[arg(
        long,
        env = "HOTPIN_MAX_BODY",
        value_name = "SIZE",
        default_value = "4MiB"
    )]
    max_body: String,
    /// Most tokens that one request may generate [default: as many as fit]
    #[arg(long, env = "HOTPIN_MAX_TOKENS", value_name = "N")]
    max_tokens: Option<u32>,
    /// Longest time of one request, seconds [default: any]
    #[arg(long, env = "HOTPIN_MAX_TIME", value_name = "S")]
    max_time: Option<u64>,
    /// Time for a request to arrive, seconds
    #[arg(long, env = "HOTPIN_RECEIVE_TIME", value_name = "S", default_value_t = Limits::default().receive.as_secs(), value_parser = clap::value_parser!(u64).range(1..=3600))]
    receive_time: u64,
    /// Time that running requests get after the server was told to stop, seconds
    #[arg(long, env = "HOTPIN_DRAIN_TIME", value_name = "S", default_value_t = Limits::default().drain.as_secs())]
    drain_time: u64,
    /// Let pages of this origin use the server; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<HeaderValue>,
    /// Use this chat template (Jinja) in place of the model's
    #[arg(long, env = "HOTPIN_CHAT_TEMPLATE", value_name = "FILE")]
    chat_template: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    control: ControlArgs,
}

impl ServeArgs {
    fn limits(&self) -> Result<Limits> {
        let body_bytes = common::size_of("--max-body", &self.max_body)?;
        let fail = |what: &str| Usage(format!("{what} must be above 0"));
        if self.connections == 0 {
            return Err(fail("--connections").into());
        }
        if self.max_tokens == Some(0) {
            return Err(fail("--max-tokens").into());
        }
        Ok(Limits {
            body_bytes: usize::try_from(body_bytes).unwrap_or(usize::MAX),
            connections: self.connections.min(tokio::sync::Semaphore::MAX_PERMITS),
            queue: self.queue,
            tokens: self.max_tokens,
            receive: Duration::from_secs(self.receive_time),
            generation: self.max_time.map(Duration::from_secs),
            drain: Duration::from_secs(self.drain_time),
        })
    }

    fn key(&self) -> Result<Option<Key>> {
        let text = match (&self.api_key, &self.api_key_file) {
            (Some(key), _) => key.clone(),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("API key {}", path.display()))?;
                text.lines().next().unwrap_or("").trim().to_owned()
            }
            (None, None) if self.host.is_loopback() => return Ok(None),
            (None, None) => {
                return Err(Usage(format!(
                    "--host {} can be reached from other machines: give --api-key as well",
                    self.host
                ))
                .into());
            }
        };
        if text.is_empty() {
            return Err(Usage("the API key must not be empty".into()).into());
        }
        Ok(Some(Key::new(&text)))
    }

    fn name(&self) -> String {
        self.alias.clone().unwrap_or_else(|| {
            self.model.file_stem().map_or_else(
                || "model".to_owned(),
                |stem| stem.to_string_lossy().into_owned(),
            )
        })
    }

    fn engine_options(&self) -> EngineOptions {
        EngineOptions {
            sequences: self.parallel,
            ..self.engine.options()
        }
    }

    fn template(&self) -> Result<Option<String>> {
        let read = |path: &Path| {
            std::fs::read_to_string(path)
                .with_context(|| format!("chat template {}", path.display()))
        };
        self.chat_template.as_deref().map(read).transpose()
    }
}

pub(super) fn execute(args: &ServeArgs) -> Result<ExitCode> {
    let (limits, key, template) = (args.limits()?, args.key()?, args.template()?);
    // Before the model is loaded, which may take minutes.
    args.control.control()?;
    let map = ModelMap::open(&args.model)?;
    let options = args.control.rig_options(args.engine_options(), &map)?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
    let address = listener.local_addr()?;
    let app = Arc::new(App::new(args.name(), key, args.host.is_loopback(), limits));
    let http = Http::start(&app, listener, &args.cors)?;
    common::note(&format!(
        "hotpin: http://{address} answers, loading {}",
        app.name
    ));
    let outcome = serve(&app, &map, options, template.as_deref());
    http.stop();
    outcome?;
    Ok(ExitCode::SUCCESS)
}

/// Loads, serves until told to stop, and takes everything apart.
fn serve(
    app: &Arc<App>,
    map: &ModelMap,
    options: RigOptions,
    template: Option<&str>,
) -> Result<()> {
    let loaded = common::load_watched(map, options.policy, &mut |fraction| {
        app.enter(Phase::Loading {
            step: "loading",
            fraction,
        });
        !app.stops()
    });
    if app.stops() {
        return Ok(());
    }
    let model = Arc::new(loaded?);
    let chat = Chat::new(&model, template)?;
    let (policy, engine) = (options.policy, options.engine.clone());
    let mut rig = common::assemble_watched(&model, map, options, &mut |fraction| {
        app.enter(Phase::Loading {
            step: "pinning",
            fraction,
        });
    })?;
    let info = info(app, map, &rig, policy, &engine);
    common::note(&format!(
        "hotpin: ready; {} requests at once, {} tokens each",
        info.parallel, info.n_ctx
    ));
    app.enter(Phase::Ready(Arc::new(Ready {
        chat,
        n_ctx: info.n_ctx,
        info,
        monitor: rig.governor.as_ref().map(|governor| governor.monitor()),
        counters: Arc::clone(&rig.counters),
        shape: map.is_moe().then(|| map.shape().clone()),
        blocks: map.layers().iter().map(|layer| layer.block).collect(),
        since: Instant::now(),
        model: Arc::clone(&model),
    })));
    Scheduler::new(
        &mut rig.session,
        Arc::clone(&app.queue),
        Arc::clone(&app.stats),
    )
    .recorded(rig.recording.clone())
    .run();
    Ok(())
}

fn info(
    app: &App,
    map: &ModelMap,
    rig: &Rig<'_>,
    policy: PolicyKind,
    engine: &EngineOptions,
) -> ModelInfo {
    ModelInfo {
        id: app.name.clone(),
        file_bytes: map.total_bytes(),
        architecture: map.architecture().to_owned(),
        expert_bytes: map.shape().total_bytes(),
        token_cycle_bytes: map.shape().token_cycle_bytes(),
        policy,
        store: rig.store.as_ref().map(|_| rig.store_kind.label()),
        n_ctx: rig.session.n_ctx(),
        parallel: rig.session.sequences(),
        n_batch: engine.n_batch,
        n_ubatch: engine.n_ubatch,
        threads: engine.threads,
    }
}
