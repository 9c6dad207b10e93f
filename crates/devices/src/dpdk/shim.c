/* The part of the DPDK device that needs DPDK's inline functions and structures: one call for each burst.
 * ffi.rs declares these functions and structures to Rust; both must agree. Functions that return int return 0
 * or a negative errno where nothing else is said. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_ip.h>
#include <rte_lcore.h>
#include <rte_log.h>
#include <rte_mbuf.h>
#include <rte_mbuf_pool_ops.h>
#include <rte_memzone.h>

/* Frames that one call of DPDK passes to or from a port. */
#define BURST_MAX 64
/* Bytes of the RSS key that decide about TCP and UDP over IPv6; keys of some ports are longer. */
#define KEY_BYTES 40
#define KEY_BYTES_MAX 64
#define TABLE_ENTRIES_MAX 512

struct ginnel_dpdk_info {
	uint8_t mac[6];
	uint16_t mtu;
	uint16_t mtu_min;
	uint16_t mtu_max;
	uint16_t rx_queues_max;
	uint16_t tx_queues_max;
	uint16_t table_entries;
	uint8_t key_bytes;
	uint16_t tx_segments_max;
	uint64_t rx_offloads;
	uint64_t tx_offloads;
	uint64_t hash_types;
	char driver[32];
};

struct ginnel_dpdk_options {
	uint16_t queues;
	/* Largest IP packet in bytes. */
	uint16_t mtu;
	/* Descriptors of each ring, as the port takes them. */
	uint16_t rx_ring;
	uint16_t tx_ring;
	/* Bytes of a frame that one buffer holds. */
	uint16_t frame_bytes;
	uint32_t buffers;
	/* The buffers of a pool fill its memory without gaps. */
	uint8_t is_umem;
	/* Not 0: the port is set to `mtu`, to receive all multicast frames, or to `mac`. */
	uint8_t sets_mtu;
	uint8_t sets_multicast;
	uint8_t sets_mac;
	uint8_t mac[6];
	uint64_t rx_offloads;
	uint64_t tx_offloads;
	/* Packets whose flows are hashed; 0 if frames are not spread. */
	uint64_t hash_types;
	uint8_t key[KEY_BYTES];
	/* Makes the names of the pools unique in this process. */
	uint32_t generation;
};

struct ginnel_dpdk_rx {
	struct rte_mbuf *mbuf;
	const uint8_t *data;
	uint32_t len;
	uint32_t hash;
	uint32_t flags;
};
#define RX_HAS_HASH 1u
#define RX_CHECKSUM_GOOD 2u
#define RX_CHECKSUM_NONE 4u /* the sender left the checksum to its device, and the data is intact */

struct ginnel_dpdk_tx {
	struct rte_mbuf *mbuf;
	uint8_t *data;
	uint32_t room;
	uint32_t len;
	uint16_t flags;
	uint16_t l2_len;
	uint16_t l3_len;
	uint16_t l4_len;
	uint16_t segment_bytes;
};
#define TX_CONTINUES 1u /* the frame continues in the next entry */
#define TX_CHECKSUM 2u  /* the port completes the checksum */
#define TX_IS_UDP 4u
#define TX_IS_V6 8u
#define TX_SUPER_FRAME 16u
#define TX_IP_CHECKSUM 32u /* the port completes the checksum of the IPv4 header */

/* Initialization */

static void (*log_sink)(const char *text, size_t len);

static ssize_t write_log(void *cookie, const char *text, size_t len)
{
	(void)cookie;
	log_sink(text, len);
	return (ssize_t)len;
}

/* Starts EAL. Returns 0, or a negative errno. */
int ginnel_dpdk_start(int argc, char **argv, void (*sink)(const char *text, size_t len))
{
	cookie_io_functions_t functions = { .write = write_log };
	FILE *stream;

	log_sink = sink;
	stream = fopencookie(NULL, "w", functions);
	if (stream == NULL || rte_openlog_stream(stream) != 0)
		return -ENOMEM;
	if (rte_eal_init(argc, argv) < 0)
		return rte_errno > 0 ? -rte_errno : -EINVAL;
	return 0;
}

/* Gives the calling thread a cache in each pool. Returns 0, or a negative errno. */
int ginnel_dpdk_register_thread(void)
{
	if (rte_lcore_id() != LCORE_ID_ANY)
		return 0;
	return rte_thread_register() == 0 ? 0 : -rte_errno;
}

void ginnel_dpdk_unregister_thread(void)
{
	rte_thread_unregister();
}

/* Ports */

/* Finds or creates the device `name` of a bus, and returns the number of its first port in `port`.
 * `arguments` begins with the name, and continues with those of the driver. */
int ginnel_dpdk_probe(const char *bus, const char *name, const char *arguments, uint16_t *port)
{
	struct rte_dev_iterator iterator;
	int error = rte_dev_probe(arguments);

	if (error != 0 && error != -EEXIST)
		return error;
	/* By the name alone: arguments of the driver would be taken for properties of the port. */
	RTE_ETH_FOREACH_MATCHING_DEV(*port, name, &iterator) {
		rte_eth_iterator_cleanup(&iterator);
		return 0;
	}
	if (error == 0)
		rte_eal_hotplug_remove(bus, name);
	return -ENODEV;
}

/* Rounds the sizes of rings to those that the port takes. Returns 0, or a negative errno. */
int ginnel_dpdk_adjust_rings(uint16_t port, uint16_t *rx_ring, uint16_t *tx_ring)
{
	return rte_eth_dev_adjust_nb_rx_tx_desc(port, rx_ring, tx_ring);
}

/* Returns the number of ports, which do not include those that other code owns. */
uint16_t ginnel_dpdk_port_count(void)
{
	return rte_eth_dev_count_avail();
}

int ginnel_dpdk_info(uint16_t port, struct ginnel_dpdk_info *out)
{
	struct rte_eth_dev_info info;
	struct rte_ether_addr mac;
	int error = rte_eth_dev_info_get(port, &info);

	if (error != 0)
		return error;
	memset(out, 0, sizeof(*out));
	error = rte_eth_macaddr_get(port, &mac);
	if (error != 0)
		return error;
	memcpy(out->mac, mac.addr_bytes, sizeof(out->mac));
	error = rte_eth_dev_get_mtu(port, &out->mtu);
	if (error != 0)
		return error;
	out->mtu_min = info.min_mtu;
	out->mtu_max = info.max_mtu;
	out->rx_queues_max = info.max_rx_queues;
	out->tx_queues_max = info.max_tx_queues;
	out->table_entries = info.reta_size;
	out->key_bytes = info.hash_key_size;
	out->tx_segments_max = info.tx_desc_lim.nb_seg_max;
	out->rx_offloads = info.rx_offload_capa;
	out->tx_offloads = info.tx_offload_capa;
	out->hash_types = info.flow_type_rss_offloads;
	snprintf(out->driver, sizeof(out->driver), "%s", info.driver_name);
	return 0;
}

/* Fills a key of a port, and returns its length, or 0 if the port takes only shorter or longer ones.
 * Drivers that do not name a length take 40 bytes. */
static uint8_t fill_key(uint8_t *out, const uint8_t *key, uint8_t key_bytes)
{
	memset(out, 0, KEY_BYTES_MAX);
	memcpy(out, key, KEY_BYTES);
	if (key_bytes == 0)
		return KEY_BYTES;
	return key_bytes < KEY_BYTES || key_bytes > KEY_BYTES_MAX ? 0 : key_bytes;
}

static void free_memory(struct rte_mempool_memhdr *chunk, void *memory)
{
	(void)chunk;
	rte_memzone_free(memory);
}

/* Creates a pool that is the UMEM of net_af_xdp. The driver of DPDK 22.11 registers as many bytes with the
 * kernel as the buffers have without gaps. The usual pool leaves a gap at the end of each page, because no
 * buffer may cross pages: its last buffers would be outside the UMEM, where the kernel drops their frames. So
 * each buffer has a power of two of bytes here, and the first one begins at a page. Returns NULL and sets
 * rte_errno if that fails. */
static struct rte_mempool *create_umem_pool(const char *name, uint32_t buffers, uint32_t data_bytes, int node)
{
	const unsigned int flags = RTE_MEMPOOL_F_NO_SPREAD | RTE_MEMPOOL_F_NO_IOVA_CONTIG;
	const uint32_t element = sizeof(struct rte_mbuf) + data_bytes;
	const uint32_t least = rte_mempool_calc_obj_size(element, flags, NULL);
	const uint32_t object = rte_align32pow2(least);
	struct rte_pktmbuf_pool_private private = { .mbuf_priv_size = 0 };
	char memory_name[RTE_MEMZONE_NAMESIZE];
	const struct rte_memzone *memory;
	struct rte_mempool *pool;
	int error;

	/* Bytes between two buffers belong to the first one. */
	private.mbuf_data_room_size = RTE_MIN(data_bytes + object - least, (uint32_t)UINT16_MAX);
	pool = rte_mempool_create_empty(name, buffers, element + object - least, 128, sizeof(private), node, flags);
	if (pool == NULL)
		return NULL;
	error = rte_mempool_set_ops_byname(pool, rte_mbuf_best_mempool_ops(), NULL);
	if (error != 0)
		goto failed;
	rte_pktmbuf_pool_init(pool, &private);
	snprintf(memory_name, sizeof(memory_name), "UMEM_%s", name);
	memory = rte_memzone_reserve_aligned(memory_name, (size_t)buffers * object, node, 0, getpagesize());
	if (memory == NULL) {
		error = -rte_errno;
		goto failed;
	}
	error = rte_mempool_populate_iova(pool, memory->addr, RTE_BAD_IOVA, (size_t)buffers * object, free_memory,
					  (void *)(uintptr_t)memory);
	if (error < 0 || (uint32_t)error != buffers) {
		/* The pool frees memory that it has. */
		if (error <= 0)
			rte_memzone_free(memory);
		error = error < 0 ? error : -ENOBUFS;
		goto failed;
	}
	rte_mempool_obj_iter(pool, rte_pktmbuf_init, NULL);
	return pool;
failed:
	rte_mempool_free(pool);
	rte_errno = -error;
	return NULL;
}

static struct rte_mempool *create_pool(const char *name, const struct ginnel_dpdk_options *options, int node)
{
	uint32_t data_bytes = options->frame_bytes + RTE_PKTMBUF_HEADROOM;

	if (options->is_umem)
		return create_umem_pool(name, options->buffers, data_bytes, node);
	return rte_pktmbuf_pool_create(name, options->buffers, 128, 0, data_bytes, node);
}

/* Configures a port with a pool for each queue, and starts it. Returns 0, or a negative errno with the
 * name of the step that failed in `step`. `pools` has room for a pool for each queue; the caller frees
 * those that are not null. */
int ginnel_dpdk_open(uint16_t port, const struct ginnel_dpdk_options *options, struct rte_mempool **pools,
		     const char **step)
{
	struct rte_eth_dev_info info;
	struct rte_eth_conf configuration;
	struct rte_eth_rxconf rx;
	struct rte_eth_txconf tx;
	struct rte_ether_addr mac;
	uint16_t queue;
	uint8_t key[KEY_BYTES_MAX];
	int error, node = rte_eth_dev_socket_id(port);

	*step = "reading its properties";
	error = rte_eth_dev_info_get(port, &info);
	if (error != 0)
		return error;
	memset(&configuration, 0, sizeof(configuration));
	configuration.rxmode.mtu = options->mtu;
	configuration.rxmode.offloads = options->rx_offloads;
	configuration.txmode.offloads = options->tx_offloads;
	if (options->hash_types != 0) {
		uint8_t key_bytes = fill_key(key, options->key, info.hash_key_size);
		configuration.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
		configuration.rx_adv_conf.rss_conf.rss_key = key_bytes > 0 ? key : NULL;
		configuration.rx_adv_conf.rss_conf.rss_key_len = key_bytes;
		configuration.rx_adv_conf.rss_conf.rss_hf = options->hash_types;
	}
	configuration.intr_conf.lsc = (*info.dev_flags & RTE_ETH_DEV_INTR_LSC) != 0;
	configuration.intr_conf.rmv = (*info.dev_flags & RTE_ETH_DEV_INTR_RMV) != 0;
	*step = "configuring the port";
	error = rte_eth_dev_configure(port, options->queues, options->queues, &configuration);
	if (error != 0)
		return error;
	for (queue = 0; queue < options->queues; queue++) {
		char name[RTE_MEMPOOL_NAMESIZE];
		*step = "allocating buffers";
		snprintf(name, sizeof(name), "ginnel_%u_%u", options->generation, queue);
		pools[queue] = create_pool(name, options, node < 0 ? SOCKET_ID_ANY : node);
		if (pools[queue] == NULL)
			return -rte_errno;
		*step = "setting up a receive queue";
		rx = info.default_rxconf;
		rx.offloads = options->rx_offloads & info.rx_queue_offload_capa;
		error = rte_eth_rx_queue_setup(port, queue, options->rx_ring, node, &rx, pools[queue]);
		if (error != 0)
			return error;
		*step = "setting up a transmit queue";
		tx = info.default_txconf;
		tx.offloads = options->tx_offloads & info.tx_queue_offload_capa;
		error = rte_eth_tx_queue_setup(port, queue, options->tx_ring, node, &tx);
		if (error != 0)
			return error;
	}
	if (options->sets_mtu) {
		*step = "setting the MTU";
		error = rte_eth_dev_set_mtu(port, options->mtu);
		if (error != 0 && error != -ENOTSUP)
			return error;
	}
	*step = "starting the port";
	error = rte_eth_dev_start(port);
	if (error != 0)
		return error;
	if (options->sets_mac) {
		memcpy(mac.addr_bytes, options->mac, sizeof(options->mac));
		*step = "setting the MAC address";
		error = rte_eth_dev_default_mac_addr_set(port, &mac);
		/* A port that cannot change its address may still deliver the frames of another one. */
		if (error == -ENOTSUP || error == -EPERM)
			error = rte_eth_promiscuous_enable(port) == 0 ? 0 : error;
		if (error != 0)
			return error;
	}
	if (!options->sets_multicast)
		return 0;
	*step = "receiving multicast frames";
	error = rte_eth_allmulticast_enable(port);
	return error == -ENOTSUP ? 0 : error;
}

/* Returns 1 if the link is up, 0 if it is down, or a negative errno. */
int ginnel_dpdk_is_up(uint16_t port)
{
	struct rte_eth_link link;
	int error;

	memset(&link, 0, sizeof(link));
	error = rte_eth_link_get_nowait(port, &link);
	if (error != 0)
		return error < 0 ? error : -error;
	return link.link_status == RTE_ETH_LINK_UP;
}

struct ginnel_dpdk_port_stats {
	uint64_t missed;
	uint64_t rx_errors;
	uint64_t no_buffer;
	uint64_t tx_errors;
};

int ginnel_dpdk_stats(uint16_t port, struct ginnel_dpdk_port_stats *out)
{
	struct rte_eth_stats stats;
	int error = rte_eth_stats_get(port, &stats);

	if (error != 0)
		return error;
	out->missed = stats.imissed;
	out->rx_errors = stats.ierrors;
	out->no_buffer = stats.rx_nombuf;
	out->tx_errors = stats.oerrors;
	return 0;
}

static void (*event_sink)(uint16_t port, int is_removal);

static int on_event(uint16_t port, enum rte_eth_event_type event, void *argument, void *result)
{
	(void)argument;
	(void)result;
	event_sink(port, event == RTE_ETH_EVENT_INTR_RMV);
	return 0;
}

/* Calls `sink` in a thread of EAL when the link changes, and when the device is removed. */
int ginnel_dpdk_watch(uint16_t port, void (*sink)(uint16_t port, int is_removal))
{
	int error;

	event_sink = sink;
	error = rte_eth_dev_callback_register(port, RTE_ETH_EVENT_INTR_LSC, on_event, NULL);
	if (error != 0)
		return error;
	return rte_eth_dev_callback_register(port, RTE_ETH_EVENT_INTR_RMV, on_event, NULL);
}

/* Stops and removes a port, and frees its pools. */
void ginnel_dpdk_close(uint16_t port, struct rte_mempool **pools, uint16_t queues)
{
	struct rte_eth_dev_info info;
	struct rte_device *device = NULL;
	uint16_t queue;

	rte_eth_dev_callback_unregister(port, RTE_ETH_EVENT_INTR_LSC, on_event, NULL);
	rte_eth_dev_callback_unregister(port, RTE_ETH_EVENT_INTR_RMV, on_event, NULL);
	if (rte_eth_dev_info_get(port, &info) == 0)
		device = info.device;
	rte_eth_dev_stop(port);
	rte_eth_dev_close(port);
	if (device != NULL)
		rte_dev_remove(device);
	for (queue = 0; queue < queues; queue++)
		rte_mempool_free(pools[queue]);
}

/* Receive-side scaling */

/* Assigns entry e of the table to queue e % 128 % queues. */
int ginnel_dpdk_set_table(uint16_t port, uint16_t entries, uint16_t queues)
{
	struct rte_eth_rss_reta_entry64 table[TABLE_ENTRIES_MAX / RTE_ETH_RETA_GROUP_SIZE];
	uint16_t entry;

	if (entries > TABLE_ENTRIES_MAX)
		return -EINVAL;
	memset(table, 0, sizeof(table));
	for (entry = 0; entry < entries; entry++) {
		struct rte_eth_rss_reta_entry64 *group = &table[entry / RTE_ETH_RETA_GROUP_SIZE];
		group->mask |= RTE_BIT64(entry % RTE_ETH_RETA_GROUP_SIZE);
		group->reta[entry % RTE_ETH_RETA_GROUP_SIZE] = entry % 128 % queues;
	}
	return rte_eth_dev_rss_reta_update(port, table, entries);
}

/* Reads the table. */
int ginnel_dpdk_get_table(uint16_t port, uint16_t *out, uint16_t entries)
{
	struct rte_eth_rss_reta_entry64 table[TABLE_ENTRIES_MAX / RTE_ETH_RETA_GROUP_SIZE];
	uint16_t entry;
	int error;

	if (entries > TABLE_ENTRIES_MAX)
		return -EINVAL;
	memset(table, 0, sizeof(table));
	for (entry = 0; entry < entries; entry++)
		table[entry / RTE_ETH_RETA_GROUP_SIZE].mask |= RTE_BIT64(entry % RTE_ETH_RETA_GROUP_SIZE);
	error = rte_eth_dev_rss_reta_query(port, table, entries);
	if (error != 0)
		return error;
	for (entry = 0; entry < entries; entry++)
		out[entry] = table[entry / RTE_ETH_RETA_GROUP_SIZE].reta[entry % RTE_ETH_RETA_GROUP_SIZE];
	return 0;
}

/* Sets the key of a port that took another one. */
int ginnel_dpdk_set_key(uint16_t port, const uint8_t *key, uint8_t key_bytes, uint64_t hash_types)
{
	uint8_t copy[KEY_BYTES_MAX];
	struct rte_eth_rss_conf rss = { .rss_key = copy, .rss_hf = hash_types };

	rss.rss_key_len = fill_key(copy, key, key_bytes);
	if (rss.rss_key_len == 0)
		return -ENOTSUP;
	return rte_eth_dev_rss_hash_update(port, &rss);
}

/* Reads the first bytes of the key, and the types of packets that are hashed. */
int ginnel_dpdk_get_key(uint16_t port, uint8_t *out, uint64_t *hash_types)
{
	uint8_t key[KEY_BYTES_MAX];
	struct rte_eth_rss_conf rss = { .rss_key = key, .rss_key_len = sizeof(key) };
	int error;

	memset(key, 0, sizeof(key));
	error = rte_eth_dev_rss_hash_conf_get(port, &rss);
	if (error != 0)
		return error;
	memcpy(out, key, KEY_BYTES);
	*hash_types = rss.rss_hf;
	return 0;
}

/* Frames */

void ginnel_dpdk_free_rx(struct ginnel_dpdk_rx *entries, uint32_t count)
{
	struct rte_mbuf *mbufs[BURST_MAX];
	uint32_t i;

	for (i = 0; i < count; i++)
		mbufs[i] = entries[i].mbuf;
	rte_pktmbuf_free_bulk(mbufs, count);
}

/* Receives up to 64 frames. Frames that span several buffers are dropped and counted: a buffer holds every
 * frame of the MTU. */
uint32_t ginnel_dpdk_receive(uint16_t port, uint16_t queue, struct ginnel_dpdk_rx *entries, uint64_t *dropped)
{
	struct rte_mbuf *mbufs[BURST_MAX];
	uint16_t i, count = rte_eth_rx_burst(port, queue, mbufs, BURST_MAX);
	uint32_t out = 0;

	for (i = 0; i < count; i++) {
		struct rte_mbuf *mbuf = mbufs[i];
		struct ginnel_dpdk_rx *entry = &entries[out];
		uint32_t flags = 0;
		uint64_t checksum;

		rte_prefetch0(rte_pktmbuf_mtod(mbuf, void *));
		if (unlikely(mbuf->nb_segs != 1)) {
			rte_pktmbuf_free(mbuf);
			++*dropped;
			continue;
		}
		if (mbuf->ol_flags & RTE_MBUF_F_RX_RSS_HASH)
			flags |= RX_HAS_HASH;
		checksum = mbuf->ol_flags & RTE_MBUF_F_RX_L4_CKSUM_MASK;
		if (checksum == RTE_MBUF_F_RX_L4_CKSUM_GOOD)
			flags |= RX_CHECKSUM_GOOD;
		else if (checksum == RTE_MBUF_F_RX_L4_CKSUM_NONE)
			flags |= RX_CHECKSUM_NONE;
		entry->mbuf = mbuf;
		entry->data = rte_pktmbuf_mtod(mbuf, const uint8_t *);
		entry->len = mbuf->data_len;
		entry->hash = mbuf->hash.rss;
		entry->flags = flags;
		out++;
	}
	return out;
}

/* Allocates `count` buffers, in blocks of up to 64. Returns how many: fewer if the pool cannot provide a
 * whole block. */
uint32_t ginnel_dpdk_allocate(struct rte_mempool *pool, struct ginnel_dpdk_tx *entries, uint32_t count)
{
	uint32_t done = 0;

	while (done < count) {
		struct rte_mbuf *mbufs[BURST_MAX];
		uint32_t i, now = RTE_MIN(count - done, (uint32_t)BURST_MAX);

		if (rte_pktmbuf_alloc_bulk(pool, mbufs, now) != 0)
			break;
		for (i = 0; i < now; i++) {
			struct ginnel_dpdk_tx *entry = &entries[done + i];
			memset(entry, 0, sizeof(*entry));
			entry->mbuf = mbufs[i];
			entry->data = rte_pktmbuf_mtod(mbufs[i], uint8_t *);
			entry->room = rte_pktmbuf_tailroom(mbufs[i]);
		}
		done += now;
	}
	return done;
}

/* Asks the driver for buffers of frames that it has sent and not freed. Most drivers free them when they
 * send, even if they send nothing. */
void ginnel_dpdk_reclaim(uint16_t port, uint16_t queue)
{
	struct rte_mbuf *none[1] = { NULL };

	if (rte_eth_tx_done_cleanup(port, queue, 0) < 0)
		rte_eth_tx_burst(port, queue, none, 0);
}

/* Frees buffers that no frame was built in, and those of frames that were not sent. */
void ginnel_dpdk_free_tx(struct ginnel_dpdk_tx *entries, uint32_t count)
{
	uint32_t i;

	for (i = 0; i < count; i++) {
		entries[i].mbuf->next = NULL;
		entries[i].mbuf->nb_segs = 1;
		rte_pktmbuf_free(entries[i].mbuf);
	}
}

static void set_offloads(struct rte_mbuf *mbuf, const struct ginnel_dpdk_tx *entry)
{
	uint8_t *l3 = rte_pktmbuf_mtod(mbuf, uint8_t *) + entry->l2_len;
	uint64_t flags = entry->flags & TX_IS_V6 ? RTE_MBUF_F_TX_IPV6 : RTE_MBUF_F_TX_IPV4;

	mbuf->l2_len = entry->l2_len;
	mbuf->l3_len = entry->l3_len;
	mbuf->l4_len = entry->l4_len;
	if (entry->flags & TX_SUPER_FRAME) {
		/* The pseudo-header of a super-frame has no length, because the lengths of its segments differ. */
		uint16_t *checksum = (uint16_t *)(l3 + entry->l3_len + 16), sum;
		flags |= RTE_MBUF_F_TX_TCP_SEG | RTE_MBUF_F_TX_TCP_CKSUM;
		mbuf->tso_segsz = entry->segment_bytes;
		if (entry->flags & TX_IS_V6) {
			sum = rte_ipv6_phdr_cksum((struct rte_ipv6_hdr *)l3, flags);
		} else {
			/* The flag belongs to each super-frame over IPv4. A port without this offload does not touch the
			 * header, which keeps its checksum. */
			flags |= RTE_MBUF_F_TX_IP_CKSUM;
			if (entry->flags & TX_IP_CHECKSUM)
				((struct rte_ipv4_hdr *)l3)->hdr_checksum = 0;
			sum = rte_ipv4_phdr_cksum((struct rte_ipv4_hdr *)l3, flags);
		}
		memcpy(checksum, &sum, sizeof(sum));
	} else {
		flags |= entry->flags & TX_IS_UDP ? RTE_MBUF_F_TX_UDP_CKSUM : RTE_MBUF_F_TX_TCP_CKSUM;
	}
	mbuf->ol_flags |= flags;
}

/* Makes a packet of the entries from `*at` up to the first one that does not continue, and moves `*at` past
 * that entry. */
static struct rte_mbuf *packet_of(struct ginnel_dpdk_tx *entries, uint32_t *at)
{
	const struct ginnel_dpdk_tx *first = &entries[*at];
	struct rte_mbuf *head = first->mbuf, *last = head;

	head->data_len = first->len;
	head->pkt_len = first->len;
	head->nb_segs = 1;
	head->ol_flags = 0;
	if (first->flags & TX_CHECKSUM)
		set_offloads(head, first);
	while (entries[(*at)++].flags & TX_CONTINUES) {
		struct rte_mbuf *part = entries[*at].mbuf;
		part->data_len = entries[*at].len;
		head->pkt_len += part->data_len;
		head->nb_segs++;
		last->next = part;
		last = part;
	}
	last->next = NULL;
	return head;
}

/* Sends the frames of `count` entries. Returns how many entries the port took. Sets `is_refused` to 1 if the
 * port can never send the frame that follows. */
uint32_t ginnel_dpdk_send(uint16_t port, uint16_t queue, struct ginnel_dpdk_tx *entries, uint32_t count,
			  uint32_t *is_refused)
{
	uint32_t at = 0;

	while (at < count) {
		struct rte_mbuf *packets[BURST_MAX];
		uint32_t ends[BURST_MAX], end = at;
		uint16_t made = 0, ready, sent;
		bool has_offloads = false;

		while (made < BURST_MAX && end < count) {
			has_offloads |= (entries[end].flags & TX_CHECKSUM) != 0;
			packets[made] = packet_of(entries, &end);
			ends[made++] = end;
		}
		ready = has_offloads ? rte_eth_tx_prepare(port, queue, packets, made) : made;
		sent = rte_eth_tx_burst(port, queue, packets, ready);
		if (sent > 0)
			at = ends[sent - 1];
		if (sent < ready)
			break;
		if (ready < made) {
			*is_refused = 1;
			break;
		}
	}
	return at;
}
