# shellcheck shell=bash disable=SC2034 # what it leaves is read by those who source it
# What a topology such as v5e:4x4 stands for: chips, hosts, machine type, and its names in each interface
#
# The names are those of jax's topology descriptions.
# A slice of several hosts has four chips a host. Sources, read in 2026 and not tried: Google's pages of v4, v5e, v5p
# and v6e (topologies, accelerator types), of Compute Engine (machine types ct5p, ct6e), of GKE (accelerator labels)
# and of TPU software versions.

read_topology() {
    local generation=${1%%:*} shape=${1#*:} allowed chips=1 side
    case $generation in
        v5e | v6e) allowed="1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16" ;;
        v4 | v5p) allowed="2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x16, 8x16x16" ;;
        *) wrong "--topology='$1'; allowed: v4, v5e, v5p or v6e, a colon and the slice, such as v5e:4x4 or v5p:2x2x4" ;;
    esac
    [[ $1 == *:* && ", $allowed," == *", $shape,"* && $shape != *[!0-9x]* ]] ||
        wrong "--topology='$1'; allowed: $generation: and one of $allowed"
    for side in ${shape//x/ }; do chips=$((chips * side)); done

    tpu_shape=$shape
    tpu_chips=$chips
    tpu_chips_per_host=4
    if [[ $generation == v[56]e && $chips -le 8 ]]; then
        tpu_chips_per_host=$chips # 1, 4 or 8 chips are one host
    fi
    tpu_hosts=$((chips / tpu_chips_per_host))
    case $generation in
        v4) # the accelerator types of v4 and v5p count TensorCores, two a chip
            tpu_type=v4-$((2 * chips))
            tpu_runtime=tpu-ubuntu2204-base
            tpu_machine=ct4p-hightpu-4t
            tpu_node_label=tpu-v4-podslice
            ;;
        v5e)
            tpu_type=v5litepod-$chips
            tpu_runtime=v2-alpha-tpuv5-lite
            tpu_machine=ct5lp-hightpu-${tpu_chips_per_host}t
            tpu_node_label=tpu-v5-lite-podslice
            ;;
        v5p)
            tpu_type=v5p-$((2 * chips))
            tpu_runtime=v2-alpha-tpuv5
            tpu_machine=ct5p-hightpu-4t
            tpu_node_label=tpu-v5p-slice
            ;;
        v6e)
            tpu_type=v6e-$chips
            tpu_runtime=v2-alpha-tpuv6e
            tpu_machine=ct6e-standard-${tpu_chips_per_host}t
            tpu_node_label=tpu-v6e-slice
            ;;
    esac
    tpu_generation=$generation
}
