#!/usr/bin/env bash
# Runs a command as root in a small virtual machine whose user land is this machine's, read-only, below a
# layer in memory. What it has and this machine may lack: cgroups of version 2 alone, and a clock that may
# be set. Usage: guest.sh FOLDER FILE COMMAND; FOLDER is where the guest's kernel and disk are kept, FILE
# lies on that disk and is seen at its own path. Exits with the command's code. As root, on Debian.
set -euo pipefail
folder=$1 file=$(realpath "$2") command=$3
here=$(pwd)
memory_mib=${GUEST_MIB:-6144}
mkdir -p "$folder"

missing=()
command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
command -v busybox >/dev/null || missing+=(busybox-static)
command -v depmod >/dev/null || missing+=(kmod)
command -v cpio >/dev/null || missing+=(cpio)
if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# Debian's kernel: its modules know 9p, which the cloud kernel does not.
if [ ! -e "$folder/kernel/.whole" ]; then
    package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*-amd64\).*/\1/p' | head -1)
    rm -rf "$folder/kernel" && mkdir -p "$folder/kernel"
    (cd "$folder" && apt-get download -qq "$package" 2>/dev/null && dpkg-deb -x linux-image-*.deb kernel && rm linux-image-*.deb)
    depmod -b "$folder/kernel" "$(ls "$folder/kernel/lib/modules")"
    touch "$folder/kernel/.whole"
fi
release=$(ls "$folder/kernel/lib/modules")

initial=$(mktemp -d)
trap 'rm -rf "$initial"' EXIT
mkdir -p "$initial"/{bin,modules,proc,sys,dev,host,layer,root}
cp "$(command -v busybox)" "$initial/bin/busybox"
number=0
for wanted in virtio_pci 9pnet_virtio 9p virtio_blk ext4 overlay loop rtc_cmos; do
    while read -r verb module _; do
        [ "$verb" = insmod ] || continue
        cp -n "$module" "$initial/modules/$(printf %02d $number)-$(basename "$module")"
        number=$((number + 1))
    done < <(modprobe -d "$folder/kernel" -S "$release" --show-depends "$wanted" 2>/dev/null)
done

cat >"$initial/init" <<INIT
#!/bin/busybox sh
b=/bin/busybox
echo
echo "guest: begins"
\$b mount -t proc none /proc; \$b mount -t sysfs none /sys; \$b mount -t devtmpfs none /dev
for module in /modules/*; do \$b insmod \$module 2>/dev/null; done
\$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=524288,cache=loose host /host || \$b poweroff -f
\$b mount -t tmpfs -o size=60% none /layer; \$b mkdir /layer/upper /layer/work
\$b mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work none /root
\$b mkdir -p "/root$(dirname "$file")"
\$b mount -t ext4 /dev/vda "/root$(dirname "$file")"
for each in proc sys dev; do \$b mount --move /\$each /root/\$each; done
\$b mkdir -p /root/dev/shm /root/dev/pts /root/tmp
\$b mount -t tmpfs none /root/dev/shm; \$b mount -t tmpfs none /root/tmp; \$b mount -t devpts none /root/dev/pts
\$b mount -t cgroup2 none /root/sys/fs/cgroup
\$b chmod 1777 /root/tmp /root/dev/shm
\$b ifconfig lo up
\$b chroot /root /usr/bin/env - PATH="$PATH" HOME="$HOME" sh -c 'cd "$here" && . /dev/shm/command' </root/dev/null
echo "guest: exit \$?"
\$b sync; \$b poweroff -f
INIT
printf '%s\n' "$command" >"$initial/command"
sed -i 's|^\$b ifconfig|$b cp /command /root/dev/shm/command; $b ifconfig|' "$initial/init"
chmod +x "$initial/init"
(cd "$initial" && find . | cpio -o -H newc --quiet | gzip -1) >"$folder/initial.gz"

# The file on a disk of its own, with room for copies, as a test makes them.
disk=$folder/disk.img
if [ ! -e "$disk" ] || [ "$file" -nt "$disk" ]; then
    content=$(mktemp -d -p "$folder")
    ln "$file" "$content/" 2>/dev/null || cp "$file" "$content/"
    rm -f "$disk" && truncate -s $(($(stat -c %s "$file") * 4 + (1 << 30))) "$disk"
    mkfs.ext4 -q -F -d "$content" "$disk"
    rm -rf "$content"
fi

# Some machines have a /dev/kvm in which nothing starts: then the processor is emulated, which is slow.
said=$folder/said
guest() {
    qemu-system-x86_64 -machine "q35,accel=$1" -cpu "$2" -smp "$(nproc)" -m "$memory_mib" \
        -kernel "$folder"/kernel/boot/vmlinuz-* -initrd "$folder/initial.gz" \
        -append "console=ttyS0 quiet panic=-1 psi=1 cgroup_no_v1=all" -no-reboot \
        -display none -monitor none -serial "file:$said" \
        -fsdev "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap" \
        -device virtio-9p-pci,fsdev=host,mount_tag=host \
        -drive "file=$disk,if=virtio,format=raw,cache=none,aio=native" </dev/null &
    pid=$!
}
for accelerator in ${GUEST_ACCELERATOR:-kvm tcg}; do
    cpu=max
    [ "$accelerator" = kvm ] && { [ -w /dev/kvm ] || continue; cpu=host,arch-capabilities=off; }
    : >"$said"
    guest "$accelerator" "$cpu"
    for _ in $(seq 30); do
        grep -q '^guest: begins' "$said" && break
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    if grep -q '^guest: begins' "$said" || [ "$accelerator" = tcg ]; then
        tail -n +1 -f --pid="$pid" "$said" | tr -d '\r'
        break
    fi
    echo "guest.sh: nothing starts with KVM here; the processor is emulated, which is slow" >&2
    kill "$pid" 2>/dev/null || true
    wait "$pid" || true
done
wait "$pid" || true
code=$(tr -d '\r' <"$said" | sed -n 's/^guest: exit \([0-9]*\)$/\1/p' | tail -1)
exit "${code:-1}"
