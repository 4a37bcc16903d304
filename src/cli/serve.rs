//! `hotpin serve`: an OpenAI-compatible HTTP server.

use super::common::{self, Usage};
use super::{Invocation, reload};
use crate::config::Config;
use crate::config::args::{
    CONTEXT_TOKENS, ControlArgs, EngineArgs, KeyArgs, KeyError, RegulationArgs, size,
};
use crate::engine::chat::Chat;
use crate::engine::{EngineOptions, Model, Placement};
use crate::learn::{Learner, Learning};
use crate::model::ModelMap;
use crate::plant::{Resumed, Rig, RigOptions};
use crate::server::{App, Http, Key, Limits, ModelInfo, Moves, Phase, Ready, make_room, tell};
use anyhow::{Context, Result};
use axum::http::HeaderValue;
use clap::Args;
use hotpin_controllers::PolicyKind;
use sd_notify::NotifyState;
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
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    control: ControlArgs,
}

/// What is served, to whom, and within which bounds.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
struct ServerArgs {
    /// Address to listen on; any but this machine's own needs --api-key
    #[arg(long, env = "HOTPIN_HOST", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "HOTPIN_PORT", default_value_t = 8080)]
    port: u16,
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
        default_value = "4MiB",
        value_parser = size
    )]
    max_body: u64,
    /// Most tokens that one request may generate [default: as many as fit]
    #[arg(long, env = "HOTPIN_MAX_TOKENS", value_name = "N")]
    max_tokens: Option<u32>,
    /// Longest time of one request, seconds [default: any]
    #[arg(long, env = "HOTPIN_MAX_TIME", value_name = "S")]
    max_time: Option<u64>,
    /// Time for a request to arrive, seconds
    #[arg(long, env = "HOTPIN_RECEIVE_TIME", value_name = "S", default_value_t = Limits::default().receive.as_secs(), value_parser = clap::value_parser!(u64).range(1..=3600))]
    receive_time: u64,
    /// Time for a client to take a part of its answer, seconds; who reads nothing is cut off
    #[arg(long, env = "HOTPIN_SEND_TIME", value_name = "S", default_value_t = Limits::default().send.as_secs(), value_parser = clap::value_parser!(u64).range(1..=3600))]
    send_time: u64,
    /// Time that running requests get after the server was told to stop, seconds
    #[arg(long, env = "HOTPIN_DRAIN_TIME", value_name = "S", default_value_t = Limits::default().drain.as_secs())]
    drain_time: u64,
    /// Let pages of this origin use the server; several are separated by commas, or given in turn
    #[arg(
        long,
        env = "HOTPIN_CORS",
        value_name = "ORIGIN",
        value_delimiter = ','
    )]
    cors: Vec<HeaderValue>,
    /// Use this chat template (Jinja) in place of the model's
    #[arg(long, env = "HOTPIN_CHAT_TEMPLATE", value_name = "FILE")]
    chat_template: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArgs,
}

impl ServerArgs {
    fn limits(&self) -> Result<Limits> {
        let fail = |what: &str| Usage(format!("{what} must be above 0"));
        if self.connections == 0 {
            return Err(fail("--connections").into());
        }
        if self.max_tokens == Some(0) {
            return Err(fail("--max-tokens").into());
        }
        Ok(Limits {
            body_bytes: usize::try_from(self.max_body).unwrap_or(usize::MAX),
            connections: self.connections.min(tokio::sync::Semaphore::MAX_PERMITS),
            queue: self.queue,
            tokens: self.max_tokens,
            receive: Duration::from_secs(self.receive_time),
            send: Duration::from_secs(self.send_time),
            generation: self.max_time.map(Duration::from_secs),
            drain: Duration::from_secs(self.drain_time),
        })
    }

    fn key(&self) -> Result<Option<Key>> {
        match self.key.text() {
            Ok(Some(text)) => Ok(Some(Key::new(&text))),
            Ok(None) if self.host.is_loopback() => Ok(None),
            Ok(None) => Err(Usage(format!(
                "--host {} can be reached from other machines: give --api-key as well",
                self.host
            ))
            .into()),
            Err(error @ KeyError::Empty) => Err(Usage(error.to_string()).into()),
            Err(error @ KeyError::Io { .. }) => Err(error.into()),
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

impl ServeArgs {
    /// Checks what can be checked before a model is there.
    pub(super) fn check(&self, config: &Config) -> Result<()> {
        self.server.limits()?;
        self.server.key()?;
        self.server.template()?;
        common::control(&self.control.regulation, config)?.check()?;
        Ok(())
    }

    /// What is regulated how.
    pub(super) fn regulation(&self) -> &RegulationArgs {
        &self.control.regulation
    }

    fn name(&self) -> String {
        self.server.alias.clone().unwrap_or_else(|| {
            self.model.file_stem().map_or_else(
                || "model".to_owned(),
                |stem| stem.to_string_lossy().into_owned(),
            )
        })
    }

    fn engine_options(&self) -> EngineOptions {
        EngineOptions {
            sequences: self.server.parallel,
            ..self.engine.options(CONTEXT_TOKENS)
        }
    }
}

pub(super) fn execute(args: &ServeArgs, invocation: &Invocation) -> Result<ExitCode> {
    let server = &args.server;
    let (mut limits, key, template) = (server.limits()?, server.key()?, server.template()?);
    limits.connections = make_room(limits.connections);
    // Before the model is loaded, which may take minutes.
    let control = common::control(&args.control.regulation, &invocation.config)?;
    let map = ModelMap::open(&args.model)?;
    let (mut options, learner) = args
        .control
        .rig_options(args.engine_options(), control, &map)?;
    options.vram.moves = true;
    let address = SocketAddr::new(server.host, server.port);
    let listener = TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
    let address = listener.local_addr()?;
    let app = Arc::new(App::new(
        args.name(),
        key,
        server.host.is_loopback(),
        limits,
    ));
    reload::watch(&app, invocation).context("waiting for SIGHUP")?;
    let http = Http::start(&app, listener, &server.cors)?;
    common::note(&format!(
        "hotpin: http://{address} answers, loading {}",
        app.name
    ));
    let placement = args.control.regulation.device.placement(&map);
    let outcome = serve(&app, &map, placement, options, learner, template.as_deref());
    http.stop();
    outcome?;
    Ok(ExitCode::SUCCESS)
}

/// Loads, serves until told to stop, and takes everything apart.
fn serve(
    app: &Arc<App>,
    map: &ModelMap,
    placement: Placement,
    options: RigOptions,
    learner: Option<Learner>,
    template: Option<&str>,
) -> Result<()> {
    let loaded = common::load_watched(map, options.policy, placement, &mut |fraction| {
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
    // Requests are prepared with words that stay when the weights are loaded anew.
    let words = if options.vram.moves && model.device().is_some() {
        Arc::new(Model::open_words(map.path())?)
    } else {
        Arc::clone(&model)
    };
    let chat = Chat::new(&words, template)?;
    let (policy, engine) = (options.policy, options.engine.clone());
    let rig = common::assemble_watched(&model, map, options, &mut |fraction| {
        app.enter(Phase::Loading {
            step: "pinning",
            fraction,
        });
    })?;
    let learning = common::start_learning(learner, &rig)?;
    let counters = Arc::clone(&rig.counters);
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
        limitations: rig.limitations.clone(),
        counters: Arc::clone(&counters),
        shape: map.is_moe().then(|| map.shape().clone()),
        blocks: map.layers().iter().map(|layer| layer.block).collect(),
        since: Instant::now(),
        model: Arc::clone(&words),
    })));
    tell(&[NotifyState::Ready, NotifyState::Status("serving")]);
    let moves = Moves {
        app,
        map,
        words: &words,
        load: &|placement, goes_on| {
            common::load_watched(map, policy, placement.clone(), &mut |_| goes_on())
                .map_err(|error| format!("{error:#}"))
        },
    };
    let due = moves.serve(Resumed { rig, lost: None }, None);
    let served = moves.follow(model, due);
    learning.map_or(Ok(()), Learning::finish)?;
    // After everything is saved: a service manager starts it anew.
    served?;
    counters
        .halted()
        .map_or(Ok(()), |cause| Err(anyhow::anyhow!("{cause}")))
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
